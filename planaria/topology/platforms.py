"""The kinds of devices that ranks compute on, one record for each: what differs between them is looked up here.

Rule: nobody compares a device's name. What a kind lacks is its `refusal`, said at the door.
"""

from __future__ import annotations

import msgspec


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of device.

    name: as `--device` has it. title: of one, for people. torch: torch's name of the device. resource: what Ray counts;
    on CPUs a rank's slot, or a core. masks: variables that say which devices a process sees; the first is the one that
    is set. files: what there is one of for each device; a `gpu_id` holds 0 where it is a CPU's. build: what torch's
    version file names where torch is built for it. collective: what carries sums between ranks where it can (else
    see mesh.ways). graphs: can a step be recorded and played again? keeps: by which calls a keeper process has its
    memory for ranks; empty: it ends with them. step_tokens: of a step at most, where nobody says. refusal: why nothing
    runs on it; empty: it does.
    """

    name: str
    title: str
    torch: str = ""
    resource: str = ""
    masks: tuple[str, ...] = ()
    files: str = ""
    build: str = ""
    collective: str = ""
    graphs: bool = False
    keeps: str = ""
    step_tokens: int = 2048
    refusal: str = ""

    @property
    def on_host(self) -> bool:
        """Do ranks compute in main memory, by the node's cores?"""
        return self.torch == "cpu"


def _refused(name: str, title: str, resource: str, mask: str, why: str) -> Platform:
    refusal = f"ranks don't compute on {title}s here: {why}"
    return Platform(name=name, title=title, resource=resource, masks=(mask,), refusal=refusal)


# On a CPU the matrix rate is reached with few rows, and who streams waits for the longest step; a GPU wants more.
CPU = Platform(name="cpu", title="CPU", torch="cpu", resource="CPU", collective="shared memory", step_tokens=512)
CUDA = Platform(
    name="cuda", title="CUDA device", torch="cuda", resource="GPU", masks=("CUDA_VISIBLE_DEVICES",),
    files="/dev/nvidia[0-9]*", build="cuda", collective="NCCL", graphs=True, keeps="cuda",
)  # fmt: skip
# By torch's name a ROCm device is a CUDA device, too, and RCCL is NCCL.
ROCM = Platform(
    name="rocm", title="ROCm device", torch="cuda", resource="GPU",
    masks=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    files="/sys/class/kfd/kfd/topology/nodes/*/gpu_id", build="hip", collective="RCCL", graphs=True,
)  # fmt: skip

PLATFORMS = {
    each.name: each
    for each in (
        CPU,
        CUDA,
        ROCM,
        _refused("xpu", "Intel GPU", "GPU", "ZE_AFFINITY_MASK", "there is no paged attention for them here"),
        _refused("tpu", "TPU", "TPU", "TPU_VISIBLE_CHIPS", "they run compiled programs (XLA), not these kernels"),
        _refused("neuron", "Neuron core", "neuron_cores", "NEURON_RT_VISIBLE_CORES", "they run compiled programs, "
                 "not these kernels"),
        _refused("hpu", "Gaudi device", "HPU", "HABANA_VISIBLE_MODULES", "there are no kernels for them here"),
        _refused("npu", "Ascend device", "NPU", "ASCEND_RT_VISIBLE_DEVICES", "there are no kernels for them here"),
    )
}  # fmt: skip
SERVED = tuple(each for each in PLATFORMS.values() if not each.refusal)
MASKED = {each.resource for each in SERVED if each.masks}
MASKS = tuple(dict.fromkeys(mask for each in SERVED for mask in each.masks))
