"""Chat templates of five families as they are published, in few lines, and a small tokenizer for each."""

from functools import cache
from typing import Any

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
</tools>

For each function call, return a json object within <tool_call></tool_call> XML tags."""

_QWEN_TOOL_RESULT = """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif -%}
"""
_HERMES_CALLS = """
{%- for call in m.tool_calls or [] -%}
{{ ('\n' if m.content or not loop.first else '') + '<tool_call>\n{"name": "' + call.function.name + '", "arguments": '
   + (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor -%}
"""
_QWEN_SYSTEM = (
    """
{%- set system = messages[0].content if messages[0].role == 'system' else DEFAULT -%}
{%- if tools %}{{ '<|im_start|>system\n' + (system + '\n\n' if system else '') }}"""
    + _TOOLS
    + """{{ '<|im_end|>\n' }}{% elif system %}{{ '<|im_start|>system\n' + system + '<|im_end|>\n' }}{% endif -%}
"""
)
QWEN25 = (
    _QWEN_SYSTEM.replace("DEFAULT", "'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'")
    + """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{ '<|im_start|>assistant\n' + m.content }}"""
    + _HERMES_CALLS
    + """{{ '<|im_end|>\n' }}{%- elif m.role == 'tool' -%}"""
    + _QWEN_TOOL_RESULT
    + """{%- elif not (loop.first and m.role == 'system') -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""
)
QWEN3 = (
    _QWEN_SYSTEM.replace("DEFAULT", "''")
    + """{%- set ns = namespace(last_query=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last_query and (loop.last or m.reasoning_content) -%}
{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif -%}
{{ m.content }}"""
    + _HERMES_CALLS
    + """{{ '<|im_end|>\n' }}{%- elif m.role == 'tool' -%}"""
    + _QWEN_TOOL_RESULT
    + """{%- elif not (loop.first and m.role == 'system') -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""
)
LLAMA3 = """{{- bos_token -}}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}{% if tools %}{{ 'Environment: ipython\n' }}{% endif -%}
{{ 'Cutting Knowledge Date: December 2023\n\n' + system + '<|eot_id|>' }}
{%- set ns = namespace(first=true) -%}
{%- for m in messages -%}
{%- if m.role == 'user' and ns.first and tools -%}
{%- set ns.first = false -%}
{{ '<|start_header_id|>user<|end_header_id|>\n\nRespond in the format {"name": function name, "parameters": dictionary '
   + 'of argument name and its value}.\n\n' }}
{%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\n\n' }}{% endfor -%}{{ m.content | trim + '<|eot_id|>' }}
{%- elif m.role == 'tool' -%}
{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}
{%- elif m.tool_calls -%}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once!') }}{% endif -%}
{%- set f = m.tool_calls[0].function -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + f.name + '", "parameters": '
   + (f.arguments | tojson) + '}<|eot_id|>' }}
{%- elif not (loop.first and m.role == 'system') -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}"""
SMOLLM2 = """{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + m['role'] + '
' + m['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
MISTRAL = """{%- if messages[0].role == 'system' %}{% set system, talk = messages[0].content, messages[1:] -%}
{%- else %}{% set system, talk = '', messages %}{% endif -%}
{%- set users = talk | selectattr('role', 'equalto', 'user') | list -%}
{{ bos_token }}
{%- for m in talk -%}
{%- if m.role == 'user' -%}
{%- if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif -%}
{{ '[INST] ' + (system + '\n\n' if loop.last and system else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls -%}
{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls -%}
{%- if not call.id or call.id | length != 9 %}{{ raise_exception('Tool call IDs have 9 letters!') }}{% endif -%}
{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else '') }}
{%- endfor -%}
{{ ']' + eos_token }}
{%- elif m.role == 'assistant' -%}
{{ ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' -%}
{{ '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else -%}
{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif -%}
{%- endfor -%}"""

TEMPLATES = {"qwen2.5": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3, "smollm2": SMOLLM2, "mistral": MISTRAL}
_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
_INST = "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
_SPECIAL = {"llama3": _LLAMA, "mistral": _INST.split()}
_ENDS = {"llama3": "<|eot_id|>", "mistral": "</s>"}
_CALL = ["<tool_call>", "</tool_call>"]
_ADDED = {"qwen2.5": _CALL, "qwen3": [*_CALL, "<tool_response>", "</tool_response>", "<think>", "</think>"]}


@cache
def tokenizer(family: str, template: str | None = None) -> Any:
    """Return a byte-level tokenizer with some hundred merges and a family's special tokens and template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    raw.train_from_iterator([*TEMPLATES.values(), "What is six times seven? It is 42.\n\n" * 4], trainer)
    raw.add_special_tokens(_SPECIAL.get(family, _CHATML))
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in _ADDED.get(family, [])])
    bos = next((text for text in ("<s>", "<|begin_of_text|>") if raw.token_to_id(text) is not None), None)
    make: Any = PreTrainedTokenizerFast
    made = make(tokenizer_object=raw, bos_token=bos, eos_token=_ENDS.get(family, "<|im_end|>"))
    made.chat_template = template or TEMPLATES[family]
    return made
