"""Every struct that frontend and workers send each other, except those of ``recipe``.

They are frozen, typed and encoded as msgpack arrays; a field is added at the end, with a default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from triptych.recipe import MediaOptions, Recipes

MediaKind = Literal["image", "video", "audio"]
PLURALS: dict[MediaKind, str] = {"image": "images", "video": "videos", "audio": "sounds"}
MediaForm = Literal["file", "embeds"]
FinishReason = Literal["stop", "length"]
if TYPE_CHECKING:
    Blob = bytes | memoryview
else:  # a decoder takes one type; the request plane sends blobs apart and puts in views of them
    Blob = bytes


class MediaMeta(Struct, frozen=True, array_like=True):
    """What later stages need of a media item: identity, length and shape."""

    key: bytes  # media key: 256-bit content identity
    tokens: int  # rows of its embedding, and so its placeholder tokens in the prompt
    grid: tuple[int, ...] = ()  # what the family needs for its layout: (t, h, w) in patches ...
    kind: MediaKind = "image"
    times: tuple[float, ...] = ()  # of a video's temporal patches, in seconds
    audio_tokens: int = 0  # of tokens, those of a video's own audio track
    # Seconds from one temporal patch to the next, if the request chose the frame rate, for families
    # that take it from the rate alone. 0: as the recipe says.
    interval: float = 0.0


class MediaItem(Struct, frozen=True, array_like=True):
    """One media item of a request.

    ``form`` file: ``data`` is an image, video or audio file as its source sent it. ``form`` embeds:
    a file with its embedding, safetensors or, where the operator permits it, of torch. An item that
    is ``prepared`` is decoded in another process's memory, and ``data`` is empty.
    """

    kind: MediaKind
    at: int  # index of its placeholder in Work.prompt
    data: Blob  # empty too in hops that do not encode
    form: MediaForm = "file"
    prepared: PreparedItem | None = None
    options: MediaOptions | None = None  # of a file; None: the model's recipe as it is


class Grammar(Struct, frozen=True, array_like=True):
    """What the generated text must be: the engine samples only tokens that can lead there."""

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str  # a JSON schema, a regular expression, a JSON array of strings, EBNF or Lark


class Sampling(Struct, frozen=True, array_like=True):
    """How tokens are sampled and when a stream ends. The frontend handles stop *strings*."""

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
    logprobs: int | None = None  # None: none; n: of the sampled token and the n best
    # No end token and no stop token before so many tokens. The frontend ignores stop strings there.
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    prompt_logprobs: int | None = None  # as ``logprobs``, of every token of the prompt
    grammar: Grammar | None = None  # None: any text


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
    """The right to read tensors in another process's memory, and how to find them."""

    owner: str  # worker id
    epoch: int  # incarnation of the owner
    transport: str  # "shm", "cuda", "inline" ...
    serial: int  # unique within (owner, epoch); a reader checks it before and after
    address: bytes  # what the transport needs to find the memory
    parts: tuple[TensorSpec, ...]
    size: int  # bytes in all
    checksum: int  # 0: not computed
    expires: float  # seconds of CLOCK_BOOTTIME on the owner's host


class PreparedItem(Struct, frozen=True, array_like=True):
    """One decoded media item in another process's memory."""

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
    """Log-probability of a sampled token, and of the best candidates, best first."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()


class PromptLogprob(Struct, frozen=True, array_like=True):
    """Log-probability of a token of the prompt, its rank (1: the best), and the best candidates."""

    id: int
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...] = ()


class MediaSpan(Struct, frozen=True, array_like=True):
    """Where a media item stands in the expanded prompt."""

    key: bytes
    start: int
    length: int  # tokens from its first to its last
    ids: tuple[int, ...] = ()  # all of them; empty: its placeholder, ``length`` times


class PromptInfo(Struct, frozen=True, array_like=True):
    """The expanded prompt, sent once with the first tokens."""

    tokens: int  # length of the expanded prompt
    cached: int  # of these, found in the prefix cache
    ids: tuple[int, ...] | None = None  # the expanded prompt, when asked for
    media: tuple[MediaSpan, ...] = ()  # of all items, in order; empty: the engine reports none
    # Of all tokens but the first, which follows nothing; empty: not asked for, or one token.
    logprobs: tuple[PromptLogprob, ...] = ()


class GetReport(Struct, frozen=True, array_like=True, tag="report"):
    """Asks a worker for its WorkerReport."""


class GetRecipes(Struct, frozen=True, array_like=True, tag="recipes"):
    """Asks a worker that encodes for the recipes of its media."""


class WatchCache(Struct, frozen=True, array_like=True, tag="cache"):
    """Asks a worker for CacheChanges: a snapshot, then every change, until the call is closed."""


class Job(Struct, frozen=True, array_like=True, tag="job"):
    """What one hop asks of one worker. The worker's role says which stages it runs."""

    work: Work  # media data only where this hop encodes
    items: tuple[int, ...] = ()  # which media items to encode here (indices into work.media)
    embeddings: tuple[Embedding, ...] = ()  # of all media items, when another worker encoded
    handover: Handover | None = None  # what prefill handed over, when another worker ran it
    # Of all media items, when a decode worker is to prefill from its prefix cache, which holds
    # their tokens. None: it is not.
    cached_media: tuple[MediaMeta, ...] | None = None
    transport: str = ""  # that the reader of the answer's tickets can use; empty: the worker's own


class Delta(Struct, frozen=True, array_like=True, tag=1):
    """New tokens of one stream."""

    ids: tuple[int, ...]
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # as long as ids, or empty
    prompt: PromptInfo | None = None
    timings: dict[str, float] | None = None  # seconds by stage


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
    """Loaded parameters, by part of the model."""

    encoder: int = 0
    language: int = 0


class WorkerReport(Struct, frozen=True, array_like=True, tag=4):
    """A worker's state and counters, shown under /cluster."""

    id: str
    role: str
    pid: int
    epoch: int
    state: Literal["ready", "draining"]
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
    counters: dict[str, float] = {}  # of its stages and engine, for /metrics
    loop_lag: float = 0.0  # seconds that its event loop was late, at worst, lately
    loop_work: float = 0.0  # CPU seconds of one turn of it, at worst, lately
    loop_stalls: int = 0
    transport: str = ""  # of its last ticket; the configured one before the first
    host: str = ""  # host name
    address: str = ""  # of its request plane
    request_plane: str = ""
    event_plane: str = ""  # of its cache changes; empty: it reports none
    device: str = ""  # cpu, cuda:1; empty: unknown


class CacheChange(Struct, frozen=True, array_like=True, tag=6):
    """What a worker's prefix cache has stored and removed, as ``blocks.hash_blocks`` names blocks.

    An empty change is a heartbeat: it carries the last sequence number. For routing alone: a lost
    change costs cache hits and never a token.
    """

    sequence: int  # 1, 2, 3 .. of one incarnation: after a gap the reader asks for a snapshot
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    snapshot: bool = False  # ``stored`` is all that the cache holds


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
    block_size: int = 0  # tokens per block of its prefix cache; 0: it reports no cache changes
    host: str = ""  # id of its machine: shows whether its pid is one of this host
    begun: int = 0  # start time of its process, in clock ticks since boot
    can_prefill_from_cache: bool = False  # media too, without their embeddings
    memory: str = ""  # whose processes can map its memory: ``transfer.segment.memory_domain``
    transports: tuple[str, ...] = ()  # of tickets that it can read
    events: str = ""  # address of its cache events; empty: it reports in calls only
    resumes: bool = False  # it continues after ``Work.generated``
    gpu: str = ""  # id of the GPU whose memory it hands over and reads; empty: host memory
    folder: str = ""  # id of its shared folder for tensors; empty: it has opened none


class KvStored(Struct, frozen=True, array_like=True, tag="stored"):
    """Blocks that an engine's prefix cache has stored, each following the one before."""

    blocks: tuple[int, ...]  # the engine's own hashes of them
    parent: int | None  # the block before the first; None: they begin a prompt
    tokens: tuple[int, ...]  # of all of them
    block_size: int
    media: tuple[tuple[tuple[bytes, int], ...], ...] = ()  # as ``blocks.hash_blocks`` takes them
    salt: str = ""  # of the tenant; set only with blocks that begin a prompt


class KvRemoved(Struct, frozen=True, array_like=True, tag="removed"):
    blocks: tuple[int, ...]


class KvCleared(Struct, frozen=True, array_like=True, tag="cleared"):
    """The cache was cleared, or events were lost: nothing is known to be cached."""


KvEvent = KvStored | KvRemoved | KvCleared
WorkerRequest = Job | GetReport | GetRecipes | WatchCache
WorkerAnswer = Delta | EncodeResult | Handover | WorkerReport | Recipes | CacheChange
