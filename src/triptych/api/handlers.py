"""Request handlers: one method for each route of ``routes``.

A handler gets the exchange and what its route declares (the decoded request with its media, or the
path parameter), and returns the response struct. Handlers that send a response themselves, as
streams do, return None.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from triptych import __version__
from triptych.api import requests
from triptych.api.anthropic_requests import (
    CountTokensRequest,
    MessagesInput,
    MessagesRequest,
    messages_to_chat,
)
from triptych.api.anthropic_responses import CountTokensResponse, MessagesFormat
from triptych.api.completion import CompletionRunner
from triptych.api.content import (
    MEDIA_DISABLED,
    MediaPolicy,
    MediaSlices,
    check_turn_media,
)
from triptych.api.form import is_form, parse_form
from triptych.api.generate import GenerateFormat
from triptych.api.media_options import with_media_options
from triptych.api.replies import ReplyFormats
from triptych.api.request_body import convert_form
from triptych.api.request_record import record_of
from triptych.api.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    GenerateSampling,
    TokenizeRequest,
    TranscriptionRequest,
)
from triptych.api.response_objects import ResponseObject, ResponsesFormat
from triptych.api.response_requests import ResponseRequest, response_to_chat
from triptych.api.response_store import (
    EarlierTurns,
    ResponseStore,
    StoredResponse,
    called_functions,
)
from triptych.api.responses import (
    ChatFormat,
    ClusterResponse,
    ClusterWorker,
    CompletionFormat,
    DetokenizeResponse,
    FrontendReport,
    FunctionChatFormat,
    HealthResponse,
    MediaDeleted,
    MediaUpload,
    ModelCard,
    ModelList,
    PlainTranscription,
    ReplyParts,
    TextFormat,
    TokenizeResponse,
    Transcription,
    TranscriptionFormat,
    UnhealthyResponse,
    VersionResponse,
    encode,
)
from triptych.api.translation import TranslatedChat
from triptych.checkpoint import Model
from triptych.config import Config
from triptych.errors import (
    ContextLengthExceeded,
    Draining,
    InvalidForm,
    InvalidMedia,
    InvalidValue,
    MediaDisabled,
    ModelNotFound,
    Overloaded,
    RequestError,
    ResponseNotFound,
    UnsupportedParameter,
)
from triptych.http.exchange import HTTPExchange
from triptych.http.server import HTTPServer
from triptych.observe import metrics
from triptych.observe.log import warning_totals
from triptych.pipeline.decoding import FrontendDecoding
from triptych.pipeline.run import Pipeline
from triptych.prompt.processor import ChatTurn, Prompt, PromptProcessor
from triptych.runtime.discovery import GENERATE, Endpoint
from triptych.sources.loader import MediaLoader
from triptych.sources.uploads import UPLOAD_SCHEME, UploadStore

BASE64_INLINE_BYTES = 2 << 20  # of base64; to decode more would block the event loop for too long
COPY_INLINE_BYTES = 1 << 20
COPY_STEP = 256 << 10  # bytes that are copied while no other thread can run


class Handlers:
    def __init__(
        self,
        config: Config,
        model: Model,
        processor: PromptProcessor,
        pipeline: Pipeline,
        sources: MediaLoader,
        uploads: UploadStore,
        decoding: FrontendDecoding | None,
    ) -> None:
        self.metrics = metrics.Metrics()
        self.server: HTTPServer | None = None  # once it listens
        self._model_name = config.served_model_name or model.name
        self.config = config
        self._limits = config.limits
        self._model = model
        self._processor = processor
        self._pipeline = pipeline
        self._sources = sources
        self._uploads = uploads
        self._decoding = decoding
        self._created = int(time.time())
        limits = config.limits
        self._responses = ResponseStore(
            limits.stored_responses,
            limits.stored_response_bytes,
            limits.stored_response_seconds,
            share=config.share(limits.stored_response_bytes),
        )
        self._media_policy = MediaPolicy(
            config.enable_multimodal, config.limits.media_items, config.media_limits
        )
        self._chat_format = ChatFormat(processor.tokenizer.token_bytes)
        self._older_format = FunctionChatFormat(processor.tokenizer.token_bytes)
        self._text_format = TextFormat(processor.tokenizer.token_bytes)
        self._reply_formats = ReplyFormats(config, processor)
        self._completions = CompletionRunner(
            self._model_name,
            model,
            processor.tokenizer,
            sources,
            pipeline,
            self.metrics,
            config.limits.grammar_bytes,
        )

    @property
    def draining(self) -> bool:
        return self.server is not None and self.server.draining

    # --- completions

    async def chat(self, exchange: HTTPExchange, request: ChatRequest, media: MediaSlices) -> None:
        format = self._older_format if request.functions else self._chat_format
        await self._answer(exchange, request, media, format)

    async def _answer(
        self,
        exchange: HTTPExchange,
        request: ChatRequest,
        media: MediaSlices,
        format: CompletionFormat,
        conversation: EarlierTurns | None = None,
    ) -> None:
        """``conversation``: adds earlier turns to those of the request."""
        self._check(request)
        policy = with_media_options(self._media_policy, request)
        tools = requests.tool_use(request, self._limits)
        options = requests.to_chat_options(request, tools, self._processor)
        parsing = self._reply_formats.parsing(request, tools)
        turns = await self._turns(request.messages, media, policy)
        if conversation is not None:
            turns = conversation.join(turns)
            check_turn_media(turns, self._media_policy)
        media.clear()
        exchange.release()  # the turns have copies of what they need from the body
        prompt: Prompt | None = None
        self._check_capacity()
        self.metrics.in_flight += 1
        try:
            prompt = await self._processor.chat(turns, options)
            await self._completions.complete(exchange, request, format, [prompt], parsing)
        except ContextLengthExceeded as error:
            error.param = "messages"
            raise
        except RequestError as error:
            if prompt is not None:
                error.param = prompt.place(error.param)
            raise
        finally:
            self.metrics.in_flight -= 1

    async def messages(
        self, exchange: HTTPExchange, request: MessagesRequest, media: MediaSlices
    ) -> None:
        thinking = request.thinking
        shows_thinking = thinking is None or thinking.display != "omitted"
        chat = self._messages_to_chat(request)
        with _original_places(chat):
            format = MessagesFormat(shows_thinking=shows_thinking)
            await self._answer(exchange, chat.request, media, format)

    async def count_tokens(
        self, exchange: HTTPExchange, request: CountTokensRequest, media: MediaSlices
    ) -> CountTokensResponse:
        chat = self._messages_to_chat(request)
        with _original_places(chat):
            self._check(chat.request)
            return CountTokensResponse(len(await self._chat_ids(chat.request, media)))

    async def create_response(
        self, exchange: HTTPExchange, request: ResponseRequest, media: MediaSlices
    ) -> None:
        tenant, previous = exchange.head.tenant, request.previous_response_id
        earlier: tuple[ChatTurn, ...] = ()
        if previous is not None:
            try:
                earlier = self._responses.conversation(tenant, previous)
            except ResponseNotFound as error:
                error.param = "previous_response_id"
                raise
        conversation = EarlierTurns(earlier, instructed=bool(request.instructions))
        chat = response_to_chat(request, media, called_functions(earlier))
        keep = None
        if request.store is not False and self._responses.enabled:
            keep = functools.partial(self._keep_response, tenant, conversation)
        format = ResponsesFormat(request, self._processor.tokenizer.token_bytes, keep)
        with _original_places(chat, conversation):
            await self._answer(exchange, chat.request, media, format, conversation)

    def _keep_response(
        self,
        tenant: str,
        conversation: EarlierTurns,
        response: ResponseObject,
        parts: ReplyParts,
    ) -> None:
        message = requests.answer_message(parts)
        try:
            answer = requests.to_turns([message], {}, self._media_policy)
        except InvalidValue:  # arguments that are nested too deeply: no template can render them
            return
        turns = (*conversation.own, *answer)
        self._responses.put(tenant, StoredResponse(response, turns))

    async def get_response(self, exchange: HTTPExchange, id: str) -> ResponseObject:
        return self._responses.get(exchange.head.tenant, id).response

    def _messages_to_chat(self, request: MessagesInput) -> TranslatedChat:
        return messages_to_chat(
            request,
            self._processor.uses_variable,
            reasons=self._reply_formats.marks_reasoning,
        )

    async def completion(
        self, exchange: HTTPExchange, request: CompletionRequest, media: MediaSlices
    ) -> None:
        await self._complete_text(exchange, request, self._text_format)

    async def generate(
        self, exchange: HTTPExchange, request: GenerateRequest, media: MediaSlices
    ) -> None:
        self._check_model(request.model)
        requests.check_token_ids(request.token_ids, self._model.vocabulary, "token_ids")
        try:
            await self._complete_text(
                exchange,
                requests.to_completion(request, self._model_name),
                GenerateFormat(request.request_id or ""),
            )
        except RequestError as error:
            if error.param == "prompt":
                error.param = "token_ids"
            elif error.param in GenerateSampling.__struct_fields__:
                error.param = f"sampling_params.{error.param}"
            raise

    async def _complete_text(
        self, exchange: HTTPExchange, request: CompletionRequest, format: CompletionFormat
    ) -> None:
        self._check(request)
        given = requests.to_prompts(request)
        for prompt in given:
            if not isinstance(prompt, str):
                requests.check_token_ids(prompt, self._model.vocabulary, "prompt")
        self._check_capacity()
        self.metrics.in_flight += 1
        try:
            prompts = [await self._processor.text(prompt) for prompt in given]
            await self._completions.complete(exchange, request, format, prompts)
        except ContextLengthExceeded as error:
            error.param = "prompt"
            raise
        finally:
            self.metrics.in_flight -= 1

    async def transcribe(self, exchange: HTTPExchange) -> Transcription | None:
        """A chat of one turn, the sound and an instruction; the answer is the transcript."""
        if not self._media_policy.enabled:
            raise MediaDisabled(MEDIA_DISABLED)
        sound, fields = await _read_form(exchange)
        exchange.release()
        request = convert_form(fields, TranscriptionRequest)
        chat = requests.to_transcription_chat(request)
        self._check(chat)
        self._check_capacity()
        self.metrics.in_flight += 1
        try:
            turn = requests.to_transcription_turn(request, sound)
            check_turn_media([turn], self._media_policy)
            prompt = await self._processor.chat([turn])
            plain = request.response_format == "text"
            format = TranscriptionFormat(PlainTranscription if plain else Transcription)
            await self._completions.complete(exchange, chat, format, [prompt])
        except RequestError as error:
            if (error.param or "messages").startswith(("messages", "media[")):
                error.param = "file"
            raise
        finally:
            self.metrics.in_flight -= 1
        return None

    async def _turns(
        self, messages: Sequence[ChatMessage], media: MediaSlices, policy: MediaPolicy
    ) -> Sequence[ChatTurn]:
        """The turns of a chat; a thread decodes much base64."""
        if sum(map(len, media.values())) <= BASE64_INLINE_BYTES:
            return requests.to_turns(messages, media, policy)
        return await asyncio.to_thread(requests.to_turns, messages, media, policy)

    def _check(self, request: ChatRequest | CompletionRequest) -> None:
        self._check_model(request.model)
        requests.check_request(request, self._limits)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._model_name:
            raise ModelNotFound("There is no such model here; /v1/models lists it.", param="model")

    def _check_draining(self) -> None:
        if self.draining:
            raise Draining("the server is stopping")

    def _check_capacity(self) -> None:
        self._check_draining()
        if self.metrics.in_flight >= self._limits.requests:
            raise Overloaded(
                f"{self._limits.requests} requests are being served already. Try again."
            )

    # --- models and tokens

    async def list_models(self, exchange: HTTPExchange) -> ModelList:
        return ModelList([self._model_card()])

    async def get_model(self, exchange: HTTPExchange, model: str) -> ModelCard:
        self._check_model(model)
        return self._model_card()

    def _model_card(self) -> ModelCard:
        media = self._model.media_ids if self._media_policy.enabled else ()
        return ModelCard(
            self._model_name,
            self._created,
            self._model.context,
            ["text", *media],
            root=self._model.name,
        )

    async def tokenize(
        self, exchange: HTTPExchange, request: TokenizeRequest, media: MediaSlices
    ) -> TokenizeResponse:
        self._check_model(request.model)
        ids: Sequence[int]
        if request.messages is not None and request.prompt is None:
            ids = await self._chat_ids(request, media)
        elif request.prompt is not None and request.messages is None:
            special = request.add_special_tokens is not False
            try:
                ids = await self._processor.tokenizer.encode(
                    request.prompt, special, self._model.context
                )
            except ContextLengthExceeded as error:
                error.param = "prompt"
                raise
        else:
            raise InvalidValue("Give either 'prompt' or 'messages'.", param="prompt")
        return TokenizeResponse(len(ids), self._model.context, ids)

    async def _chat_ids(
        self, request: ChatRequest | TokenizeRequest, media: MediaSlices
    ) -> Sequence[int]:
        """The prompt of a chat, in which a media item is one placeholder."""
        tools = requests.tool_use(request, self._limits)
        options = requests.to_chat_options(request, tools, self._processor)
        turns = await self._turns(request.messages or (), media, self._media_policy)
        return (await self._processor.chat(turns, options)).ids

    async def detokenize(
        self, exchange: HTTPExchange, request: DetokenizeRequest, media: MediaSlices
    ) -> DetokenizeResponse:
        self._check_model(request.model)
        requests.check_token_ids(request.tokens, self._model.vocabulary, "tokens")
        return DetokenizeResponse(await self._processor.tokenizer.decode(request.tokens, False))

    # --- uploads

    async def upload(self, exchange: HTTPExchange) -> MediaUpload:
        """Store the body as a media file for later requests of the same tenant."""
        if not self._media_policy.enabled:
            raise MediaDisabled(MEDIA_DISABLED)
        if not exchange.size:
            raise InvalidMedia("The body is empty: send the media file itself.")
        self._check_draining()
        if is_form(exchange.head.headers.get(b"content-type", b"")):
            data, fields = await _read_form(exchange)
            for name in fields:
                raise UnsupportedParameter(f"The field '{name}' is not supported.", param=name)
        else:
            data = await _copy_view(memoryview(exchange.body)[: exchange.size])
        if (record := record_of(exchange)) is not None:
            record.count_media(len(data))
        upload = self._uploads.put(exchange.head.tenant, data)
        return MediaUpload(upload.id, upload.size, int(time.time()), int(upload.expires))

    async def delete_upload(self, exchange: HTTPExchange, id: str) -> MediaDeleted:
        # A proxy may have made one slash of two.
        url = UPLOAD_SCHEME + id.removeprefix(UPLOAD_SCHEME.rstrip("/")).lstrip("/")
        self._uploads.drop(exchange.head.tenant, url)
        return MediaDeleted(url)

    # --- operations

    async def health(self, exchange: HTTPExchange) -> HealthResponse | None:
        missing = self._pipeline.missing()
        if not self.draining and not missing:
            return HealthResponse()
        unhealthy = (
            UnhealthyResponse("draining")
            if self.draining
            else UnhealthyResponse("unready", missing)
        )
        exchange.send(503, encode(unhealthy))
        return None

    async def ping(self, exchange: HTTPExchange) -> None:
        """Health by the status alone, as load balancers of SageMaker ask for it."""
        healthy = not self.draining and not self._pipeline.missing()
        exchange.send(200 if healthy else 503, b"", b"text/plain")

    async def version(self, exchange: HTTPExchange) -> VersionResponse:
        return VersionResponse(__version__)

    async def live(self, exchange: HTTPExchange) -> HealthResponse:
        return HealthResponse()

    async def prometheus(self, exchange: HTTPExchange) -> None:
        self.metrics.loop_lag = None if self.server is None else self.server.lag
        self.metrics.media = self._media_counters()
        self.metrics.routing = self._pipeline.routing
        self.metrics.connections = warning_totals()
        text = self.metrics.text(await self._pipeline.cluster())
        exchange.send(200, text, metrics.CONTENT_TYPE)

    def _media_counters(self) -> dict[str, float]:
        decoding = {} if self._decoding is None else self._decoding.counters
        bodies = {} if self.server is None else self.server.admission.counters
        uploads = {"uploaded_bytes": self._uploads.held}
        return {**self._sources.counters, **decoding, **bodies, **uploads}

    async def cluster(self, exchange: HTTPExchange) -> ClusterResponse:
        namespace = self.config.namespace
        workers = [
            msgspec.convert(
                msgspec.structs.asdict(report)
                | {"endpoint": str(Endpoint(namespace, report.id, GENERATE))},
                ClusterWorker,
                from_attributes=True,
            )
            for report in await self._pipeline.cluster()
        ]
        frontend = FrontendReport(
            pid=os.getpid(),
            state="draining" if self.draining else "ready",
            in_flight=self.metrics.in_flight,
            tensor_bytes=self._pipeline.tensor_bytes,
            tickets=0 if self._decoding is None else self._decoding.tickets,
            media=self._media_counters(),
            routing={"by": self.config.routing, **self._pipeline.routing},
        )
        return ClusterResponse(
            topology=str(self.config.topology),
            discovery=msgspec.structs.replace(self._pipeline.discovery_status, namespace=namespace),
            frontend=frontend,
            workers=workers,
            unused=self._pipeline.unused,
        )


async def _read_form(exchange: HTTPExchange) -> tuple[bytes, dict[str, str]]:
    """A copy of the one file of a form, and its other fields."""
    kind = exchange.head.headers.get(b"content-type", b"")
    if exchange.size > COPY_INLINE_BYTES:
        form = await asyncio.to_thread(parse_form, kind, exchange.body, exchange.size)
    else:
        form = parse_form(kind, exchange.body, exchange.size)
    files = [field for field in form if field.is_file]
    if len(files) != 1 or not len(files[0].data):
        raise InvalidForm("The form must have one file, which is not empty.", param="file")
    fields: dict[str, str] = {}
    for field in form:
        if field.name in fields:
            raise InvalidForm(f"The form has '{field.name}' twice.", param=field.name)
        if not field.is_file:
            fields[field.name] = field.text()
    return await _copy_view(files[0].data), fields


async def _copy_view(view: memoryview) -> bytes:
    """A thread makes large copies."""
    return await asyncio.to_thread(_copy, view) if len(view) > COPY_INLINE_BYTES else bytes(view)


@contextmanager
def _original_places(
    chat: TranslatedChat, conversation: EarlierTurns | None = None
) -> Iterator[None]:
    """Errors name the parameters of the original request, not of the chat."""
    try:
        yield
    except RequestError as error:
        param = error.param
        if conversation is not None:
            param = conversation.place(param)
        error.param = chat.place(param)
        raise


def _copy(body: memoryview) -> bytes:
    """A copy in steps, between which other threads can run; joining them releases the GIL."""
    return b"".join([bytes(body[at : at + COPY_STEP]) for at in range(0, len(body), COPY_STEP)])
