"""The drivers of ranks: one for each kind of subject.

base             the life of a rank, which all drivers share
hook             trains a model under DDP with the hook registered on it
averager         sets parameters and has them averaged
optimizer        gives parameters gradients and has them stepped
strategy         trains in micro-batches, each inside the strategy's context
joinable         trains on uneven inputs in a join context
collective       sends messages through a quantized collective
wrapper          trains a network whose blocks are wrapped
cuda_graph       captures a step and replays it
uneven_inputs    trains under torch's ``Join``
simulated_ranks  many ranks in one process
_joinables       the kit's own joinables
_blocks          networks with blocks to wrap
"""
