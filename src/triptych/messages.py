"""Every struct that frontend and workers send each other, but for ``recipe``'s.

They are frozen, typed and encoded as msgpack arrays; a field is added at the end, with a default.
No behaviour lives here beyond what a struct can tell of itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from triptych.recipe import Recipes

MediaKind = Literal["image", "video", "audio"]
MediaForm = Literal["file", "embeds"]
FinishReason = Literal["stop", "length"]
if TYPE_CHECKING:
    Blob = bytes | memoryview
else:  # a decoder knows one type only; the request plane sends blobs apart and puts views in place
    Blob = bytes


class MediaMeta(Struct, frozen=True, array_like=True):
    """What later stages must know of a media item: identity, length and shape."""

    key: bytes  # media key: 256-bit content identity
    tokens: int  # rows of its embedding, and so its placeholder tokens in the prompt
    grid: tuple[int, ...] = ()  # what the family needs to lay it out: (t, h, w) in patches ...
    kind: MediaKind = "image"
    times: tuple[float, ...] = ()  # of a video's temporal patches, in seconds
    sound: int = 0  # of tokens, those of a video's own audio track


class MediaItem(Struct, frozen=True, array_like=True):
    """One media item of a request.

    ``file``: the bytes of an image, video or audio file as its source had them. ``embeds``: those
    of a file with its embedding, which is safetensors or, where the operator permits it, torch's.
    What is ``prepared`` lies decoded in another process's memory, and ``data`` is empty.
    """

    kind: MediaKind
    at: int  # index of its placeholder in Work.prompt
    data: Blob  # empty too where the hop does not encode
    form: MediaForm = "file"
    prepared: PreparedItem | None = None


class Sampling(Struct, frozen=True, array_like=True):
    """How tokens are chosen and when they end. Stop *strings* are the frontend's."""

    seed: int  # always set: the frontend draws one when the client gives none
    max_tokens: int | None = None  # None: what is left of the context
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end tokens
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: of the chosen token and the n best


class Work(Struct, frozen=True, array_like=True):
    """A request ready for the pipeline: one choice, one stream of tokens."""

    id: str
    prompt: tuple[int, ...]  # token ids, one placeholder id for each media item
    media: tuple[MediaItem, ...]
    sampling: Sampling
    salt: str = ""  # the tenant's cache scope
    return_prompt_ids: bool = False
    # Tokens that another worker generated before it was lost: generation continues after them.
    # Only a worker that ``resumes`` gets any.
    generated: tuple[int, ...] = ()


class TensorSpec(Struct, frozen=True, array_like=True):
    """One tensor inside a ticket's memory."""

    dtype: str  # "float32", "bfloat16", "uint8" ...
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the ticket's memory


class Ticket(Struct, frozen=True, array_like=True):
    """A claim on tensors that a worker holds for a reader."""

    owner: str  # worker id
    epoch: int  # incarnation of the owner
    transport: str  # "shm", "cuda", "inline" ...
    generation: int  # unique within (owner, epoch); a reader checks it before and after
    address: bytes  # what the transport needs to find the memory
    parts: tuple[TensorSpec, ...]
    size: int  # bytes in all
    checksum: int  # 0: not computed
    expires: float  # seconds of CLOCK_BOOTTIME on the owner's host


class PreparedItem(Struct, frozen=True, array_like=True):
    """One decoded media item in another process's memory: ``media.base.Prepared`` on its way."""

    meta: MediaMeta
    ticket: Ticket
    cost: int
    encoded: bool = False


class Embedding(Struct, frozen=True, array_like=True):
    """One encoded media item in another worker's memory."""

    meta: MediaMeta
    ticket: Ticket


class TopLogprob(Struct, frozen=True, array_like=True):
    id: int
    logprob: float


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Log-probability of a chosen token, and of the best ones at its place, best first."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()


class MediaSpan(Struct, frozen=True, array_like=True):
    """Where a media item stands in the expanded prompt."""

    key: bytes
    start: int
    length: int  # tokens from its first to its last, whatever stands between
    ids: tuple[int, ...] = ()  # all of them; none: its placeholder again and again


class PromptInfo(Struct, frozen=True, array_like=True):
    """Told once, with the first tokens."""

    tokens: int  # length of the expanded prompt
    cached: int  # of these, taken from the prefix cache
    ids: tuple[int, ...] | None = None  # the expanded prompt, when asked for
    media: tuple[MediaSpan, ...] = ()  # of all items, in order; none: the engine does not tell


class GetReport(Struct, frozen=True, array_like=True, tag="describe"):
    """Asks a worker for its WorkerReport."""


class GetRecipes(Struct, frozen=True, array_like=True, tag="recipes"):
    """Asks a worker that encodes how it wants its media prepared."""


class WatchCache(Struct, frozen=True, array_like=True, tag="cache"):
    """Asks a worker for its CacheChanges: all that it holds, then what changes, until closed."""


class Job(Struct, frozen=True, array_like=True, tag="job"):
    """What one hop asks of one worker. The worker's role says which stages it runs."""

    work: Work  # media data only where this hop encodes
    items: tuple[int, ...] = ()  # which media items to encode here (indices into work.media)
    embeddings: tuple[Embedding, ...] = ()  # of all media items, when another worker encoded
    handover: Handover | None = None  # what prefill handed over, when another worker ran it
    # Of all media items, when a worker that decodes is to prefill too: what stands for them is in
    # its prefix cache. None: it is not.
    cached_media: tuple[MediaMeta, ...] | None = None
    transport: str = ""  # that the reader of the answer's tickets can use; empty: the worker's own


class Delta(Struct, frozen=True, array_like=True, tag=1):
    """New tokens of one stream."""

    ids: tuple[int, ...]
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # as long as ids, or empty
    prompt: PromptInfo | None = None
    timings: dict[str, float] | None = None  # seconds by what they were spent on


class EncodeResult(Struct, frozen=True, array_like=True, tag=2):
    """The answer of a hop that only encodes. The tickets live while the call is open."""

    embeddings: tuple[Embedding, ...]  # in the order of Job.items
    timings: dict[str, float] | None = None


class Handover(Struct, frozen=True, array_like=True, tag=3):
    """The answer of a hop that ends with prefill: first token and KV cache.

    The ticket lives while the call is open. No ticket: the first token was also the last.
    """

    delta: Delta
    media: tuple[MediaMeta, ...]
    kv: Ticket | None


class ParameterCounts(Struct, frozen=True, array_like=True):
    """Loaded parameters by part of the model."""

    encoder: int = 0
    language: int = 0


class WorkerReport(Struct, frozen=True, array_like=True, tag=4):
    """A worker's account of itself, shown under /cluster."""

    id: str
    role: str
    pid: int
    epoch: int
    state: Literal["loading", "ready", "draining"]
    engine: str
    parameters: ParameterCounts
    queued: int
    running: int
    kv_blocks_total: int
    kv_blocks_free: int
    tickets: int  # published and not yet released
    segments: int  # shared-memory segments in use by tickets
    descriptors: int  # open file descriptors of the process
    bytes_sent: dict[str, int]  # by transport
    bytes_received: dict[str, int]
    counters: dict[str, float] = {}  # whatever else its stages and engine count, for /metrics
    loop_lag: float = 0.0  # seconds that its event loop was late, at worst, lately
    loop_work: float = 0.0  # CPU seconds of one turn of it, at worst, lately
    loop_stalls: int = 0
    transport: str = ""  # by which it handed over last; what is configured, while it has not
    host: str = ""  # its name, for people
    address: str = ""  # where it is called
    request_plane: str = ""
    event_plane: str = ""  # how it tells what it has cached; empty: it tells nothing
    device: str = ""  # cpu, cuda:1; empty: its engine does not say


class CacheChange(Struct, frozen=True, array_like=True, tag=6):
    """What a worker's prefix cache has stored and removed, as ``blocks.hash_blocks`` names blocks.

    One that says nothing is a beat: it only tells which number was the last.
    For routing alone: who misses a change sends requests elsewhere, and gets the same tokens.
    """

    sequence: int  # 1, 2, 3 .. of one incarnation: whoever sees one missing asks anew
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    snapshot: bool = False  # stored is all there is: forget what was known


class Failure(Struct, frozen=True, array_like=True):
    """An error on its way to the client."""

    status: int
    code: str
    message: str
    param: str | None = None


class WorkerRecord(Struct, frozen=True):
    """A worker's entry in discovery."""

    id: str
    role: str
    epoch: int
    address: str  # host:port of its request plane
    pid: int
    model: str
    state: Literal["ready", "draining"] = "ready"
    block_size: int = 0  # tokens of a block of its prefix cache; 0: it tells nothing of that
    host: str = ""  # its machine: a name for people, and what tells whether its pid is one of ours
    begun: int = 0  # when its process was started, in ticks since its host was
    can_prefill_from_cache: bool = False  # it can prefill media from that cache alone
    memory: str = ""  # whose processes can map its memory: ``transfer.segment.memory_domain``
    transports: tuple[str, ...] = ()  # whose tickets it can read
    events: str = ""  # where it tells what it has cached; none: to whoever calls
    resumes: bool = False  # it goes on after ``Work.generated``
    gpu: str = ""  # whose memory it hands out and reads: the GPU's name everywhere; none: no GPU's


class KvStored(Struct, frozen=True, array_like=True, tag="stored"):
    """Blocks that an engine's prefix cache holds from now on, each following the one before."""

    blocks: tuple[int, ...]  # the engine's own names of them
    parent: int | None  # the block before the first; None: they begin a prompt
    tokens: tuple[int, ...]  # of all of them
    block_size: int
    media: tuple[tuple[tuple[bytes, int], ...], ...] = ()  # as ``blocks.hash_blocks`` takes them
    salt: str = ""  # of the tenant; told only with blocks that begin a prompt


class KvRemoved(Struct, frozen=True, array_like=True, tag="removed"):
    blocks: tuple[int, ...]


class KvCleared(Struct, frozen=True, array_like=True, tag="cleared"):
    """Nothing is known to be cached any more: it was cleared, or we have missed what happened."""


KvEvent = KvStored | KvRemoved | KvCleared
WorkerRequest = Job | GetReport | GetRecipes | WatchCache
WorkerAnswer = Delta | EncodeResult | Handover | WorkerReport | Recipes | CacheChange
