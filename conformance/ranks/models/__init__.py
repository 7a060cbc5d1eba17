"""The models that train in ranks.

probe          parameters whose gradients are scripted, and a small real network
ddp_model      a model under DDP, its optimizer, and the hook registered on it
training_loop  optimizers, schedules, clipping and a gradient scaler, as scripts use them
"""
