"""The tokenizer of a model directory, shared by a run and the checks before it. Decodes, and renders chat templates.

tokenizer.json takes precedence wherever it exists. transformers' tokenizer classes rebuild theirs from parts of that
file, differently in each version: some lose the spaces of a byte-level vocabulary, some split digits differently.
"""

import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from asyncflow.agreement import digest_of
from asyncflow.checkpoint_files import content_hash
from asyncflow.errors import ConfigError, UserCodeFailed
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import Callee
from workers.data.model_files import TOKENIZER_SETTINGS, load_raw_tokenizer, read_object
from workers.settings.data import TemplateSettings

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE = "data.chat_template"
"""The setting that asks for a chat template, unless an evaluation's does."""
FILES = (
    TOKENIZER_FILE, "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json",
    TOKENIZER_SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a model directory that decide how a prompt is tokenized."""
_TEMPLATES = "additional_chat_templates"
# Settings that make transformers deviate from tokenizer.json. (It obeys `add_bos_token` and `add_eos_token` only
# without tokenizer.json.)
_CHANGE_TOKENS = ("split_special_tokens", "fix_mistral_regex")
# Settings whose tokens transformers adds if tokenizer.json lacks them
_NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
    "additional_special_tokens", "extra_special_tokens", "added_tokens_decoder",
)  # fmt: skip
PROBES = (
    "What is the sum of 12 and 30?  Two  spaces,\ttabs\n\n  and lines.",
    'a1 2b 333 4444 1234567 0.5 -7 12+30=42 x^2 {"k": [1, 2]}',
    "It's naïve; Привет мир, 你好，世界。こんにちは مرحبا بالعالم שלום नमस्ते 안녕 ไทย 🙂🏳️‍🌈",
)
"""Texts that tell different tokenizers apart."""
_ASKED = {"role": "user", "content": PROBES[0]}
_PROBE_CONVERSATIONS = ([_ASKED], [_ASKED, {"role": "assistant", "content": PROBES[1]}, _ASKED])


def load_tokenizer(model_dir: Path, templates: TemplateSettings = TemplateSettings()) -> Any:  # noqa: B008
    """Return the transformers tokenizer in `model_dir`; never uses the network. Raises ConfigError if there is none,
    transformers cannot read it, or its chat template ignores one of the options."""
    # AutoTokenizer imports torch, in four times the time: services and workers of rollouts, and checks, are torch-free.
    if (model_dir / TOKENIZER_FILE).is_file():
        from transformers import PreTrainedTokenizerFast as Loader
    else:
        from transformers import AutoTokenizer as Loader

    if (model_dir / TOKENIZER_SETTINGS).is_file():
        read_object(model_dir / TOKENIZER_SETTINGS, "the tokenizer's settings")
    try:
        tokenizer = Loader.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model.path: cannot load the tokenizer of {model_dir}: {reason}") from error
    # Our checks refuse or skip what is too long, and name the setting; transformers would warn of it besides.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    if templates.options:
        _check_options(tokenizer, templates.options)
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **templates.options)
    if templates.time is not None and "strftime_now" in str(tokenizer.chat_template):
        tokenizer.apply_chat_template = _StoppedClock(tokenizer, templates.time).apply_chat_template
    return tokenizer


def _check_options(tokenizer: Any, options: Mapping[str, Any]) -> None:
    """Refuse an option that would silently change nothing."""
    templates = tokenizer.chat_template or ""
    found = [_names_of(one) for one in (templates.values() if isinstance(templates, dict) else (templates,))]
    for name in options:
        if not any(used is None or name in used for used in found):
            raise ConfigError(
                f"data.chat_template_options: the chat template of {tokenizer.name_or_path} does not use {name!r}; "
                f"remove it"
            )


def _names_of(template: str) -> set[str] | None:
    """Return the variables that a template reads; None: it does not parse, which rendering will report."""
    from jinja2 import TemplateSyntaxError, meta
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    try:
        return set(meta.find_undeclared_variables(module._compile_jinja_template(template).environment.parse(template)))
    except TemplateSyntaxError:
        return None


class _StoppedClock:
    """Renders a tokenizer's chat template as if at a fixed local time. Raises ConfigError if this version of
    transformers takes the time from elsewhere."""

    _lock = threading.Lock()

    def __init__(self, tokenizer: Any, template_time: str) -> None:
        self._render: Callable[..., Any] = tokenizer.apply_chat_template
        self.strftime = strftime_of(template_time)
        self.now = lambda *_: self
        probe = self.apply_chat_template([{"role": "user", "content": "x"}], chat_template=_ASKS_TIME, tokenize=False)
        if probe != template_time:
            raise ConfigError(
                f"model.path: the chat template of {tokenizer.name_or_path} asks for the time, and transformers "
                f"{version('transformers')} tells it {probe}, not data.template_time; use another version"
            )

    def apply_chat_template(self, *given: Any, **options: Any) -> Any:
        from transformers.utils import chat_template_utils

        module: Any = chat_template_utils
        with self._lock:
            clock = module.datetime
            # transformers reads the time from its module's `datetime` and accepts no function from its callers.
            module.datetime = self
            try:
                return self._render(*given, **options)
            finally:
                module.datetime = clock


_ASKS_TIME = "{{ strftime_now('%Y-%m-%dT%H:%M:%S') }}"


def strftime_of(template_time: str) -> Callable[[str], str]:
    """Return the `strftime_now` of a clock stopped at a local time, independent of time zone and locale."""
    when = datetime.fromisoformat(template_time)
    texts = {
        "a": _DAYS[when.weekday()][:3],
        "A": _DAYS[when.weekday()],
        "b": _MONTHS[when.month - 1][:3],
        "h": _MONTHS[when.month - 1][:3],
        "B": _MONTHS[when.month - 1],
        "p": "AM" if when.hour < 12 else "PM",
        "P": "am" if when.hour < 12 else "pm",
        "c": f"{_DAYS[when.weekday()][:3]} {_MONTHS[when.month - 1][:3]} {when.day:2d} {when:%H:%M:%S %Y}",
        "x": f"{when:%m/%d/%y}",
        "X": f"{when:%H:%M:%S}",
        "r": f"{when:%I:%M:%S} {'AM' if when.hour < 12 else 'PM'}",
        "s": str(int(when.replace(tzinfo=UTC).timestamp())),
        "%": "%",
    }

    def field(found: re.Match[str]) -> str:
        flags, name = found[1], found[2]
        text = texts.get(name)
        if text is None:
            return when.strftime(found[0])
        if "#" in flags and name == "p":
            return text.lower()
        return text.upper() if {*flags} & {*"^#"} else text

    def strftime_now(format: str) -> str:  # (templates may pass `format` by name)
        return re.sub(r"%([-_0^#]*)\d*[EO]?([a-zA-Z%])", field, format)

    return strftime_now


_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


def tokenizer_files(model_dir: Path) -> dict[str, str]:
    """Return what identifies tokenizer and chat template: file name -> xxh3-64 of its content (16 hex digits)."""
    templates = sorted((model_dir / _TEMPLATES).glob("*.jinja"))
    paths = [*(model_dir / name for name in FILES), *templates]
    try:
        return {str(path.relative_to(model_dir)): content_hash(path) for path in paths if path.is_file()}
    except OSError as error:
        raise ConfigError(f"model.path: cannot read {error.filename}: {error.strerror}; correct it") from error


def changed_tokenizer(model_dir: Path, before: Mapping[str, str]) -> str:
    """Return a message if the files differ from an earlier `tokenizer_files`, else ""."""
    now = tokenizer_files(model_dir)
    changed = sorted(name for name in {*now, *before} if now.get(name) != before.get(name))
    if not before or not changed:  # (an earlier version's run did not record them)
        return ""
    if not now:
        return f"model.path: {model_dir} no longer holds a tokenizer; put it back"
    verb = "is" if len(changed) == 1 else "are"
    return (
        f"model.path: {', '.join(changed)} of {model_dir} {verb} not what the run began with, and would change its "
        f"prompts"
    )


def token_identity(tokenizer: Any, *, chat: bool, prompts: "Sequence[str | Conversation]" = ()) -> dict[str, str]:
    """Return, by name, digests of what a tokenizer, its chat template (`chat`) and its end tokens give on fixed probes
    and on a run's first prompts (conversations with `chat`): equal ones make the same prompts and ends."""
    tokens = tokenizer(list(PROBES), verbose=False)["input_ids"]
    marks = _marks(tokenizer, chat=chat)
    special = sorted(marks.pop("special"))
    found = {
        "tokens of the probe texts": digest_of([tokens, [tokenizer.decode(ids) for ids in tokens], special]),
        "end tokens": digest_of(marks),
    }
    if chat:
        found["chat template"] = digest_of([_rendered(tokenizer, each) for each in _PROBE_CONVERSATIONS])
    if prompts:
        texts = [each if isinstance(each, str) else _rendered(tokenizer, each) for each in prompts]
        tokens = tokenizer(texts, verbose=False, add_special_tokens=not chat)["input_ids"]
        found["first chunk of the data"] = digest_of([texts, tokens])
    return found


def _rendered(tokenizer: Any, conversation: "Conversation") -> str:
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # noqa: BLE001 (a template may raise anything; the checks of the data report it)
        return type(error).__name__


def says_all(model_dir: Path) -> bool:
    """Return whether tokenizer.json alone decides the tokens: the settings beside it neither change nor add any."""
    raw = load_raw_tokenizer(model_dir)
    if raw is None:
        return False
    known = {token.content for token in raw.get_added_tokens_decoder().values()}
    for name in (TOKENIZER_SETTINGS, "special_tokens_map.json", "added_tokens.json"):
        if not (model_dir / name).is_file():
            continue
        settings = read_object(model_dir / name, "the tokenizer's settings")
        if any(settings.get(key) is not None for key in _CHANGE_TOKENS):
            return False
        named = settings if name == "added_tokens.json" else {key: settings.get(key) for key in _NAMED_TOKENS}
        if not {*_contents(list(named) if name == "added_tokens.json" else list(named.values()))} <= known:
            return False
    return True


def _contents(values: object) -> list[str]:
    """Return the texts of tokens, in any of the forms in which settings write them."""
    match values:
        case str():
            return [values]
        case {"content": str(content)}:
            return [content]
        case dict():
            return _contents(list(values.values()))
        case list():
            return [text for value in values for text in _contents(value)]
    return []


class TextDecoder:
    """Decodes tokens, dropping special ones. Any thread may call it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._prompt = lru_cache(maxsize=4096)(self._decode_tokens)

    def decode_prompt(self, tokens: Sequence[int]) -> str:
        # Cached: all responses of a group share a prompt.
        return self._prompt(tuple(tokens))

    def decode_response(self, tokens: Sequence[int]) -> str:
        return self._decode_tokens(tokens)

    def _decode_tokens(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


Conversation = list[dict[str, str]]
_DEADLINE_S = 60.0  # for one call, i.e. about a chunk of prompts.


class ModelTokenizer:
    """The tokenizer that a run will use, for a process without torch: the launcher.

    Where tokenizer.json decides everything, this process uses it directly. Otherwise, and for chat templates (`chat`),
    a child process loads the tokenizer that makes the run's prompts (`workers.data.prompt_dataset`). Use as a context
    manager; leaving it ends the child. All methods raise ConfigError if the tokenizer cannot be loaded; `key` is the
    setting that asks for a chat template, for errors.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        chat: bool,
        templates: TemplateSettings = TemplateSettings(),  # noqa: B008
        key: str = CHAT_TEMPLATE,
    ) -> None:
        self.model_dir, self.chat = model_dir, chat
        self._raw = load_raw_tokenizer(model_dir) if says_all(model_dir) else None
        self._pool: CallPool | None = None
        # Templates come from strangers: transformers runs them in jinja2's sandbox, and the child lets us kill an
        # endless one.
        if chat or self._raw is None:
            settings = {
                "model_dir": str(model_dir),
                "chat": chat,
                "templates": msgspec.to_builtins(templates),
                "key": key,
            }
            what = f"{key}: the chat template of {model_dir}" if chat else "model.path: the tokenizer"
            self._pool = CallPool(
                Entry("workers.data.tokenizer:tokenizer_in_child", settings),
                what=what,
                limit="the deadline",
                timeout_s=_DEADLINE_S,
                concurrency=1,
            )

    def __enter__(self) -> "ModelTokenizer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.close()

    def render_conversations(self, conversations: Sequence[Conversation]) -> list[str]:
        """Return each conversation's text up to where the model's response begins. Raises ConfigError if there is no
        template, or it is broken, refuses the messages (many refuse a system message), or takes too long."""
        return list(self._ask_child("render", conversations))

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the tokens of each text; `special` adds what the tokenizer itself puts around a text."""
        if self._raw is not None:
            return [one.ids for one in self._raw.encode_batch_fast(texts, add_special_tokens=special)]
        return list(self._ask_child("encode", texts, special))

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts, including special tokens."""
        if self._raw is not None:
            return self._raw.decode_batch([list(ids) for ids in tokens], skip_special_tokens=False)
        return list(self._ask_child("decode", tokens))

    def token_names(self, tokens: Sequence[int]) -> list[str | None]:
        """Return how the tokenizer writes each token; None: it has no such token."""
        if self._raw is not None:
            return [self._raw.id_to_token(token) for token in tokens]
        return list(self._ask_child("names", tokens))

    def special_marks(self) -> dict[str, Any]:
        """Return the token ids `bos`, `eos` and `end` (which the template writes after an assistant's message), each
        None if absent, and `special`, the texts of all special tokens."""
        if self._pool is not None:
            return dict(self._ask_child("marks"))
        assert self._raw is not None
        file = self.model_dir / TOKENIZER_SETTINGS
        settings = read_object(file, "the tokenizer's settings") if file.is_file() else {}
        found = {name: (*_contents(settings.get(f"{name}_token")), None)[0] for name in ("bos", "eos")}
        ids = {name: None if text is None else self._raw.token_to_id(text) for name, text in found.items()}
        return {**ids, "end": None, "special": []}

    def _ask_child(self, *question: Any) -> Any:
        assert self._pool is not None, "a child is there for what this process does not know"
        try:
            self._pool.until_ready()
            answer = self._pool.call_and_wait(
                *question, on=f"{len(question[1])} prompts" if len(question) > 1 else "its marks"
            )
        except UserCodeFailed as error:
            raise ConfigError(str(error)) from error
        if isinstance(answer, str):
            raise ConfigError(answer)
        return answer


def missing_chat_template(model_dir: Path, key: str = CHAT_TEMPLATE) -> ConfigError:
    return ConfigError(f"{key}: the tokenizer of {model_dir} has none; set it to false")


def tokenizer_in_child(model_dir: str, chat: bool, templates: Mapping[str, Any], key: str) -> Callee:
    """Load the tokenizer in the child process. Its answers are lists, or a text that says what is wrong with the
    template."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # blocks the import, which takes several seconds
    tokenizer = load_tokenizer(Path(model_dir), msgspec.convert(templates, TemplateSettings))
    if chat and not tokenizer.chat_template:
        raise missing_chat_template(Path(model_dir), key)

    def render(conversations: Sequence[Conversation]) -> list[str] | str:
        from jinja2 import TemplateSyntaxError

        try:
            return [
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                for messages in conversations
            ]
        except TemplateSyntaxError as error:
            return f"model.path: the chat template of {model_dir} is broken: {error}; repair it"
        except Exception as error:  # noqa: BLE001 (a template may raise anything)
            advice = "leave out what it does not know (a system prompt?), or repair it"
            return f"{key}: the chat template of {model_dir} fails: {error}; {advice}"

    def names(tokens: Sequence[int]) -> list[str | None]:
        found = (tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None for token in tokens)
        return [None if name is None else str(name) for name in found]

    answers: dict[str, Callable[..., Any]] = {
        "render": render,
        "encode": lambda texts, special: tokenizer(texts, add_special_tokens=special)["input_ids"],
        "decode": lambda tokens: [tokenizer.decode(ids, skip_special_tokens=False) for ids in tokens],
        "names": names,
        "marks": lambda: _marks(tokenizer, chat=chat),
    }
    return Callee(lambda question, *given: answers[question](*given))


def _marks(tokenizer: Any, *, chat: bool) -> dict[str, Any]:
    """See `ModelTokenizer.special_marks`."""
    special = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    end, mark = None, "qzReplyEndsHereqz"
    if chat:
        with suppress(Exception):  # a template may refuse a conversation that ends with an answer
            asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
            behind = str(tokenizer.apply_chat_template(asked, tokenize=False)).rpartition(mark)[2]
            ids = tokenizer.encode(behind, add_special_tokens=False)
            end = next((token for token in ids if token in special), None)
    return {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "end": end, "special": list(special.values())}
