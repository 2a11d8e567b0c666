"""The tokenizer of a model directory: one for a run and for the checks before it. Decodes, and renders chat templates.

tokenizer.json is the tokenizer wherever there is one. transformers' classes build theirs again from parts of that file,
each version in its own way: some lose the spaces of a byte-level vocabulary, some split digits otherwise.
"""

import json
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

from asyncflow.errors import ConfigError, UserCodeFailed
from asyncflow.run_files import content_hash
from workers.calls.pool import CallPool, Entry
from workers.calls.user_function import Callee
from workers.data.model_files import TOKENIZER_SETTINGS, load_raw_tokenizer, read_object
from workers.settings.data import TemplateSettings

TOKENIZER_FILE = "tokenizer.json"
FILES = (
    TOKENIZER_FILE, "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json",
    TOKENIZER_SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a model directory that decide which tokens a prompt is."""
_TEMPLATES = "additional_chat_templates"
_CHANGE_TOKENS = ("split_special_tokens", "fix_mistral_regex")
"""Settings with which transformers tokenizes otherwise than tokenizer.json says. It obeys `add_bos_token` and
`add_eos_token` where there is no tokenizer.json alone."""
_NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
    "additional_special_tokens", "extra_special_tokens", "added_tokens_decoder",
)  # fmt: skip
"""Settings whose tokens transformers adds where tokenizer.json lacks them."""
PROBES = (
    "What is the sum of 12 and 30?  Two  spaces,\ttabs\n\n  and lines.",
    'a1 2b 333 4444 1234567 0.5 -7 12+30=42 x^2 {"k": [1, 2]}',
    "It's naïve; Привет мир, 你好，世界。こんにちは مرحبا بالعالم שלום नमस्ते 안녕 ไทย 🙂🏳️‍🌈",
)
"""Texts on which tokenizers differ that are not the same."""


def load_tokenizer(model_dir: Path, templates: TemplateSettings = TemplateSettings()) -> Any:  # noqa: B008
    """Return the transformers tokenizer in `model_dir`; never asks the network.

    Args:
        model_dir: of the model.
        templates: what its chat template is told.

    Raises:
        ConfigError: there is none, or transformers cannot read it; its chat template does not use an option.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (model_dir / TOKENIZER_SETTINGS).is_file():
        read_object(model_dir / TOKENIZER_SETTINGS, "the tokenizer's settings")
    loader: Any = PreTrainedTokenizerFast if (model_dir / TOKENIZER_FILE).is_file() else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model.path: cannot load the tokenizer of {model_dir}: {reason}") from error
    if templates.options:
        _check_options(tokenizer, templates.options)
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **templates.options)
    if templates.time is not None and "strftime_now" in str(tokenizer.chat_template):
        tokenizer.apply_chat_template = _StoppedClock(tokenizer, templates.time).apply_chat_template
    return tokenizer


def _check_options(tokenizer: Any, options: Mapping[str, Any]) -> None:
    """Refuse an option that would change nothing, in silence."""
    templates = tokenizer.chat_template or ""
    found = [_names_of(one) for one in (templates.values() if isinstance(templates, dict) else (templates,))]
    for name in options:
        if not any(used is None or name in used for used in found):
            raise ConfigError(
                f"data.chat_template_options: the chat template of {tokenizer.name_or_path} does not use {name!r}; "
                f"remove it"
            )


def _names_of(template: str) -> set[str] | None:
    """Return the names that a template takes from those who render it; None: it is broken, which rendering says."""
    from jinja2 import TemplateSyntaxError, meta
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    try:
        return set(meta.find_undeclared_variables(module._compile_jinja_template(template).environment.parse(template)))
    except TemplateSyntaxError:
        return None


class _StoppedClock:
    """Renders a tokenizer's chat template at a time.

    transformers asks `datetime` of its module for what templates are told, and takes no function from its callers.
    """

    _lock = threading.Lock()

    def __init__(self, tokenizer: Any, template_time: str) -> None:
        """Raises:
        ConfigError: this version of transformers asks elsewhere.
        """
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
        """See transformers."""
        from transformers.utils import chat_template_utils

        module: Any = chat_template_utils
        with self._lock:
            clock = module.datetime
            module.datetime = self
            try:
                return self._render(*given, **options)
            finally:
                module.datetime = clock


_ASKS_TIME = "{{ strftime_now('%Y-%m-%dT%H:%M:%S') }}"


def strftime_of(template_time: str) -> Callable[[str], str]:
    """Return the `strftime_now` of a clock that stands at a local time, whatever zone and locale a process has."""
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

    def strftime_now(format: str) -> str:  # (templates may name it)
        return re.sub(r"%([-_0^#]*)\d*[EO]?([a-zA-Z%])", field, format)

    return strftime_now


_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


def tokenizer_files(model_dir: Path) -> dict[str, str]:
    """Return which tokenizer and which chat template these are: name of a file -> 16 hex digits of its content.

    Raises:
        ConfigError: one cannot be read.
    """
    templates = sorted((model_dir / _TEMPLATES).glob("*.jinja"))
    paths = [*(model_dir / name for name in FILES), *templates]
    try:
        return {str(path.relative_to(model_dir)): content_hash(path) for path in paths if path.is_file()}
    except OSError as error:
        raise ConfigError(f"model.path: cannot read {error.filename}: {error.strerror}; correct it") from error


def changed_tokenizer(model_dir: Path, before: Mapping[str, str]) -> str:
    """Return what is wrong where the tokenizer's files are not those of `tokenizer_files` before; "": they are.

    Raises:
        ConfigError: a file cannot be read.
    """
    now = tokenizer_files(model_dir)
    changed = sorted(name for name in {*now, *before} if now.get(name) != before.get(name))
    if not before or not changed:  # (a run of an earlier version did not write them down)
        return ""
    if not now:
        return f"model.path: {model_dir} holds no tokenizer any more; put it back"
    verb = "is" if len(changed) == 1 else "are"
    return (
        f"model.path: {', '.join(changed)} of {model_dir} {verb} not what the run began with, and prompts would be "
        f"others"
    )


def token_probe(tokenizer: Any) -> str:
    """Return what a transformers tokenizer makes of `PROBES`, there and back: equal for those that are the same."""
    tokens = tokenizer(list(PROBES), verbose=False)["input_ids"]
    return json.dumps([tokens, [tokenizer.decode(ids) for ids in tokens]])


def says_all(model_dir: Path) -> bool:
    """Return whether tokenizer.json alone decides the tokens: the settings beside it change and add nothing."""
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
    """Return the texts of tokens, however the settings write them."""
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
    """Turns tokens into text without special tokens. Any thread may call it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._prompt = lru_cache(maxsize=4096)(self._decode)

    def prompt(self, tokens: Sequence[int]) -> str:
        """Return a prompt's text; all responses of a group ask for the same one."""
        return self._prompt(tuple(tokens))

    def response(self, tokens: Sequence[int]) -> str:
        """Return a response's text."""
        return self._decode(tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


Conversation = list[dict[str, str]]
_DEADLINE_S = 60.0
"""Of one call, which is about a chunk of prompts."""


class ModelTokenizer:
    """The tokenizer of a model directory, as a run has it, for a process without torch: the launcher.

    Where tokenizer.json says all, it is asked here. Else, and for chat templates, a child process loads the tokenizer
    that makes a run's prompts (`workers.data.prompt_dataset`). Templates come with models from strangers. Transformers
    runs them in jinja2's sandbox; one that never ends is killed. Use it as a context manager: leaving it ends the
    child.
    """

    def __init__(self, model_dir: Path, *, chat: bool, templates: TemplateSettings = TemplateSettings()) -> None:  # noqa: B008
        """Begin to start the child, if one is needed.

        Args:
            model_dir: of the model.
            chat: there are conversations to render.
            templates: see `load_tokenizer`.

        Raises:
            ConfigError: a file of the tokenizer cannot be read.
        """
        self.model_dir, self.chat = model_dir, chat
        self._raw = load_raw_tokenizer(model_dir) if says_all(model_dir) else None
        self._pool: CallPool | None = None
        if chat or self._raw is None:
            settings = {"model_dir": str(model_dir), "chat": chat, "templates": msgspec.to_builtins(templates)}
            what = f"data.chat_template: the chat template of {model_dir}" if chat else "model.path: the tokenizer"
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

    def render(self, conversations: Sequence[Conversation]) -> list[str]:
        """Return, of each conversation, the text in front of the model's response.

        Raises:
            ConfigError: the model has no tokenizer or no template; the template is broken, refuses the messages (many
                refuse a system message), or takes too long.
        """
        return list(self._ask("render", conversations))

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the tokens of texts.

        Args:
            texts: of prompts.
            special: with what the tokenizer itself puts around a text.

        Raises:
            ConfigError: the tokenizer cannot be loaded.
        """
        if self._raw is not None:
            return [one.ids for one in self._raw.encode_batch_fast(texts, add_special_tokens=special)]
        return list(self._ask("encode", texts, special))

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of tokens, special ones too."""
        if self._raw is not None:
            return self._raw.decode_batch([list(ids) for ids in tokens], skip_special_tokens=False)
        return list(self._ask("decode", tokens))

    def names(self, tokens: Sequence[int]) -> list[str | None]:
        """Return how the tokenizer writes tokens; None: it has no such one."""
        if self._raw is not None:
            return [self._raw.id_to_token(token) for token in tokens]
        return list(self._ask("names", tokens))

    def marks(self) -> dict[str, Any]:
        """Return tokens with a meaning: `bos`, `eos` and `end`, which the template writes behind an assistant's
        message, each a number or None; and `special`, the texts of all special ones."""
        if self._pool is not None:
            return dict(self._ask("marks"))
        assert self._raw is not None
        file = self.model_dir / TOKENIZER_SETTINGS
        settings = read_object(file, "the tokenizer's settings") if file.is_file() else {}
        found = {name: (*_contents(settings.get(f"{name}_token")), None)[0] for name in ("bos", "eos")}
        ids = {name: None if text is None else self._raw.token_to_id(text) for name, text in found.items()}
        return {**ids, "end": None, "special": []}

    def _ask(self, *question: Any) -> Any:
        assert self._pool is not None, "a child is there for what this process does not know"
        try:
            self._pool.until_ready()
            answer = self._pool.call(*question, on=f"{len(question[1])} prompts" if len(question) > 1 else "its marks")
        except UserCodeFailed as error:
            raise ConfigError(str(error)) from error
        if isinstance(answer, str):
            raise ConfigError(answer)
        return answer


def missing_chat_template(model_dir: Path) -> ConfigError:
    """Return the error for a tokenizer without a chat template."""
    return ConfigError(f"data.chat_template: the tokenizer of {model_dir} has none; set it to false")


def tokenizer_in_child(model_dir: str, chat: bool, templates: Mapping[str, Any]) -> Callee:
    """Load the tokenizer, in the child; what it answers is a list, or what is wrong with the template.

    Raises:
        ConfigError: there is no tokenizer, or it has no template.
    """
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # not to be imported: that takes several seconds
    tokenizer = load_tokenizer(Path(model_dir), msgspec.convert(templates, TemplateSettings))
    if chat and not tokenizer.chat_template:
        raise missing_chat_template(Path(model_dir))

    def render(conversations: Sequence[Conversation]) -> list[str] | str:
        from jinja2 import TemplateSyntaxError

        try:
            return [
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                for messages in conversations
            ]
        except TemplateSyntaxError as error:
            return f"model.path: the chat template of {model_dir} is broken: {error}; repair it"
        except Exception as error:  # noqa: BLE001 (a stranger's template raises what it likes)
            advice = "leave out what it does not know (a system prompt?), or repair it"
            return f"data.chat_template: the chat template of {model_dir} fails: {error}; {advice}"

    def names(tokens: Sequence[int]) -> list[str | None]:
        found = (tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None for token in tokens)
        return [None if name is None else str(name) for name in found]

    def marks() -> dict[str, Any]:
        special = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        end, mark = None, "qzReplyEndsHereqz"
        if chat:
            with suppress(Exception):  # a template may refuse an answer, or what is not alternating
                asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
                behind = str(tokenizer.apply_chat_template(asked, tokenize=False)).rpartition(mark)[2]
                ids = tokenizer.encode(behind, add_special_tokens=False)
                end = next((token for token in ids if token in special), None)
        return {
            "bos": tokenizer.bos_token_id,
            "eos": tokenizer.eos_token_id,
            "end": end,
            "special": list(special.values()),
        }

    answers: dict[str, Callable[..., Any]] = {
        "render": render,
        "encode": lambda texts, special: tokenizer(texts, add_special_tokens=special)["input_ids"],
        "decode": lambda tokens: [tokenizer.decode(ids, skip_special_tokens=False) for ids in tokens],
        "names": names,
        "marks": marks,
    }
    return Callee(lambda question, *given: answers[question](*given))
