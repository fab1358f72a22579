"""What a service and its engine worker say to each other, besides the bytes in the staging slab.

Torch-free, so that services can import it. The channel (kvoy.engine.channel) carries these pickled over a
socket pair between a parent and the child it started: both ends are the same code of the same release.
The worker obeys in the order received and answers each Order with exactly one message, but for those that say so.
"""

from dataclasses import dataclass

from kvoy.core.step import StepPlan, StepResult
from kvoy.core.types import KvDtype, KvSpec, ModelInfo
from kvoy.core.wire import Place, WireRun

DEFAULT_POOL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How to start a worker. ``threads`` is the number of CPU threads torch may use."""

    model: str
    """Preset name, GGUF file, Hugging Face directory or hub id."""
    dtype: str
    """fp32 or bf16: weights and activations. int4: bf16, with the four-bit weights of a GGUF file for few rows."""
    block_tokens: int
    pool_bytes: int
    """Upper bound of the KV pool; the worker reports how many blocks that gave."""
    slot_bytes: int
    slots: int
    threads: int
    kv_dtype: str = "auto"
    """fp32, bf16 or int8: the KV pool, and so what is shipped; auto is what ``dtype`` computes in."""
    device: str = "cpu"
    """cpu, cuda, or auto: a GPU that can do all that is needed, else the CPU."""
    graph_rows: int = 0
    """Decode steps of up to so many rows are captured as CUDA graphs, which takes time at the start and memory; 0: none
    (a pod that only prefills needs none). Without a GPU it means nothing."""
    context_tokens: int = 0
    """Cap on the context; 0 is what the model says."""
    deterministic: bool = False
    """Prove at the start that no row's result depends on its batch mates, and make it so where it is not."""
    cores_shared: bool = False
    """Others compute on the same cores: threads that wait for each other sleep, instead of spinning for a moment."""


@dataclass(frozen=True, slots=True)
class Progress:
    """While the worker starts, before Ready or Failed: a line for a person about what takes long."""

    message: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's first answer: the model is loaded and warm."""

    model: ModelInfo
    kv_spec: KvSpec
    pool_blocks: int
    eos_token_ids: tuple[int, ...]
    load_s: float
    reads_lent: bool = False
    """Imports may name memory of other processes: the pool is in the host's."""


@dataclass(frozen=True, slots=True)
class MapLent:
    """The first ``nbytes`` of memory of another process, whose descriptor was passed to the worker, are to be known
    under this number. Answered by Mapped."""

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ForgetLent:
    """No later order names it. Not answered."""

    number: int


@dataclass(frozen=True, slots=True)
class RunStep:
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class ExportBlocks:
    """Copy pool blocks into a slot, in wire order (KvSpec), block after block, layers ``[first_layer, +layers)``.

    ``valid_tokens`` counts the tokens that are filled over all the blocks given; positions past it are
    written as zeros, so that nothing of an earlier owner leaves the pod.
    """

    transfer_id: int
    slot: int
    blocks: tuple[int, ...]
    first_layer: int
    layers: int
    valid_tokens: int
    wire: KvDtype | None = None
    """What the slot is to hold; None: as the pool has it."""


@dataclass(frozen=True, slots=True)
class ImportBlocks:
    """The inverse of ExportBlocks: copy a slot into pool blocks; bit for bit, unless formats differ. With a ``place``
    what the slot would hold lies there, and the slot is not touched: the worker takes what lies there, and writes it
    into the pool if it has the ``checksum`` (xxh3-64)."""

    transfer_id: int
    slot: int
    blocks: tuple[int, ...]
    first_layer: int
    layers: int
    run: WireRun | None = None
    """What the slot holds; None: these blocks, as the pool has them."""
    place: Place | None = None
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave after the orders before this one. Not answered; the worker exits 0."""


Order = RunStep | ExportBlocks | ImportBlocks | MapLent | ForgetLent | Stop


@dataclass(frozen=True, slots=True)
class StepDone:
    result: StepResult


@dataclass(frozen=True, slots=True)
class Exported:
    transfer_id: int


@dataclass(frozen=True, slots=True)
class Imported:
    transfer_id: int
    is_right: bool = True
    """False: what lay at its place is not what was sent, and nothing of it is in the pool."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """``is_readable``: imports may name it."""

    number: int
    is_readable: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker cannot go on (at start: the model cannot be loaded) and exits 1; one sentence for a person.
    ``is_model_error``: what must be mended is the model or a setting, not this program."""

    message: str
    is_model_error: bool = False


Answer = Ready | StepDone | Exported | Imported | Mapped | Failed
