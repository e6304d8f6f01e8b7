"""Several GPUs: what models on one GPU do not need yet."""

from kernelcat.report.techniques.technique import Group, Technique

_ONE = "models run on one GPU."

GROUP = Group(
    "Distributed and multi-GPU",
    (
        Technique(
            "Tensor Parallelism (TP)",
            "Each GPU has some columns or rows of every weight, and sums are added twice a layer.",
            "Shoeybi et al., Megatron-LM (2019)",
            not_yet=_ONE,
        ),
        Technique(
            "Pipeline Parallelism (PP)",
            "Each GPU has some layers, and batches pass from one to the next.",
            "Huang et al., GPipe (2019)",
            not_yet=_ONE,
        ),
        Technique(
            "Context and sequence parallelism",
            "Each GPU has some tokens of a long prompt.",
            "Korthikanti et al., Sequence Parallelism (2022)",
            not_yet=_ONE,
        ),
        Technique(
            "Ring Attention",
            "Keys travel around a ring of GPUs while each attends to what it holds.",
            "Liu, Zaharia and Abbeel, Ring Attention (2023)",
            not_yet=_ONE + " attn_merge is the step that would join its parts.",
        ),
        Technique(
            "NCCL tuning",
            "Algorithms, channels and protocols of collectives are chosen for a topology.",
            "NVIDIA, NCCL documentation, environment variables",
            not_yet=_ONE,
        ),
        Technique(
            "GPUDirect RDMA",
            "A network card reads and writes device memory.",
            "NVIDIA, GPUDirect RDMA documentation",
            not_yet=_ONE,
        ),
        Technique(
            "NIXL",
            "A library moves caches between GPUs, hosts and storage.",
            "NVIDIA, Dynamo, NIXL documentation",
            not_yet="caches stay on the GPU that made them.",
        ),
        Technique(
            "All-reduce and all-gather",
            "Sums or pieces of all GPUs come to each of them.",
            "Thakur, Rabenseifner and Gropp, Collective Communication in MPICH (2005)",
            not_yet=_ONE,
            aliases=("All-reduce", "All-gather"),
        ),
        Technique(
            "Symmetric memory and one-sided puts",
            "All GPUs have a buffer at the same offset, and kernels write to each other's.",
            "PyTorch, SymmetricMemory (2024); NVIDIA, NVSHMEM documentation",
            not_yet=_ONE,
        ),
    ),
)
