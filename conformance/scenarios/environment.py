"""The environment variables that change a run: those that the kit sets, and those of the caller.

This module imports no torch.
"""

import re
from collections.abc import Mapping

# Every rank has these, whatever the caller has set.
KIT_ENVIRONMENT = {
    # One thread per rank: torch's default makes a check 12 to 24 times slower on two cores.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_FR_BUFFER_SIZE": "256",
    # Older versions of torch have this name for the same setting.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "256",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_DESYNC_DEBUG": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONUNBUFFERED": "1",
}

# The libraries that compute and communicate. torchrun's own variables (TORCHELASTIC_) differ after
# each restart, and change no result.
_PREFIXES = (
    "TORCH_",
    "PYTORCH_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "DNNL_",
    "ONEDNN_",
    "OPENBLAS_",
    "CUDA_",
    "CUBLAS_",
    "CUDNN_",
)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
# An address with a password in it.
_SECRET_VALUE = re.compile(r"://[^/\s@]+@")


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torch and of the libraries below it, without secrets.

    A variable is a secret if its name says so, or if its value is an address with a password.
    """
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES)
        and not _SECRET_NAME.search(name)
        and not _SECRET_VALUE.search(value)
    }
