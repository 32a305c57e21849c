"""Training text of the demo models: Python's own standard library.

Owns which files are read, which are held out, how a file becomes chat turns,
and the tokenizer. The library's source is under the PSF licence, which allows
this use; every Python installation has it, so nothing is downloaded.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
# The reasoning and tool-call parsers of Qwen3.5 look these up by name.
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

# Never trained on: the prompts that measure a model are cut from these.
HELD_OUT = (
    "textwrap.py",
    "fractions.py",
    "bisect.py",
    "shelve.py",
    "sched.py",
    "csv.py",
    "graphlib.py",
    "calendar.py",
    "json/encoder.py",
    "email/headerregistry.py",
    "asyncio/queues.py",
    "importlib/resources/readers.py",
)
# Tables and generated text teach a model nothing about code.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}
{{- tool | tojson }}{{ '\\n' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content or [] %}{{- part.text or '' }}{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking %}
{{- '<think>\\n' }}
{%- else %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def library_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def training_files() -> list[Path]:
    """The library's source files, sorted, without the held-out ones."""
    root = library_root()
    held_out = {root / name for name in HELD_OUT}
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if path not in held_out
        and not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
        and path.stat().st_size > 200
    ]


def read_source(path: Path) -> str:
    """A source file's text; bytes that are not UTF-8 are replaced."""
    return path.read_text(encoding="utf-8", errors="replace")


def chat_turns(source: str) -> Iterator[tuple[str, str]]:
    """(question, answer) pairs cut from a module: a docstring asks, its function answers."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    # ast.get_source_segment splits the whole module anew for every function.
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        doc = ast.get_docstring(node)
        code = "\n".join(lines[node.lineno - 1 : node.end_lineno])[node.col_offset :]
        if doc and code and len(code) < 2500:
            summary = doc.strip().splitlines()[0]
            yield f"Write a Python function {node.name}: {summary}", f"```python\n{code}\n```"


def chat_text(question: str, answer: str) -> str:
    """One conversation as the chat template renders it, thinking off."""
    return (
        f"{TURN_START}user\n{question}{TURN_END}\n"
        f"{TURN_START}assistant\n<think>\n\n</think>\n\n{answer}{TURN_END}\n"
    )


def training_documents(seed: int) -> list[str]:
    """Every training document once, in an order that `seed` decides: modules and conversations."""
    sources = [read_source(path) for path in training_files()]
    chats = [
        "".join(chat_text(question, answer) for question, answer in chat_turns(source))
        for source in sources
    ]
    documents = [*sources, *(chat for chat in chats if chat)]
    random.Random(seed).shuffle(documents)
    return documents


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` entries with GPT-2's pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL_TOKENS, *MARKER_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((read_source(path) for path in training_files()), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
