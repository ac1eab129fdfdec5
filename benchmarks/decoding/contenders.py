"""The table of contenders, and what the worker of each is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llminfer.errors import UsageError

REFERENCE = "generate-float32"
# name=value pairs that make a contender of ours without a row: llminfer+weights=int8+cache=growing
_OURS = ("weights", "engine", "cache", "compiled", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to run the model.

    Attributes:
        kind: a row of the worker's table, which says how it is loaded and run.
        options: what the worker is told besides the model.
        kv_bytes_per_element: of the keys and values that a step reads.
        made: the maker and format of the file that a peer needs; it is made once.
    """

    name: str
    kind: str
    options: Mapping[str, object] = field(default_factory=dict)
    kv_bytes_per_element: int = 4
    made: tuple[str, str] | None = None

    @property
    def is_peer(self) -> bool:
        """True for another program, which lives in an environment of its own."""
        return self.kind not in ("generate", "llminfer")


def _ours(name: str, **options: object) -> Contender:
    element_bytes = 2 if options.get("dtype") in ("bfloat16", "float16") else 4
    return Contender(name=name, kind="llminfer", options=options, kv_bytes_per_element=element_bytes)


def _llama(file_format: str | None) -> Contender:
    """With the key and value type that goes with the weights; the file as it is without a format."""
    kv_dtype = "float32" if file_format == "float32" else "float16"
    return Contender(
        name=f"llama.cpp-{file_format or 'as-is'}",
        kind="llama.cpp",
        options={"kv_dtype": kv_dtype},
        kv_bytes_per_element=4 if kv_dtype == "float32" else 2,
        made=("gguf", file_format or "as-is"),
    )


CONTENDERS: tuple[Contender, ...] = (
    Contender(name=REFERENCE, kind="generate", options={"dtype": "float32"}),
    Contender(name="generate-bfloat16", kind="generate", options={"dtype": "bfloat16"}, kv_bytes_per_element=2),
    _ours("llminfer"),
    _ours("llminfer-bfloat16", dtype="bfloat16"),
    _ours("llminfer-growing", cache="growing"),
    _ours("llminfer-float32", weights="float32", cache="growing"),
    _ours("llminfer-float16", weights="float16", cache="growing"),
    _ours("llminfer-int8", weights="int8", cache="growing"),
    _ours("llminfer-int4", weights="int4", cache="growing"),
    _ours("llminfer-compiled", compiled=True, cache="static"),
    _ours("llminfer-compiled-float16", compiled=True, cache="static", weights="float16"),
    _ours("native-float32", engine="native", weights="float32", cache="growing"),
    _ours("native-float16", engine="native", weights="float16", cache="growing"),
    _ours("native-int8", engine="native", weights="int8", cache="growing"),
    _ours("native-int4", engine="native", weights="int4", cache="growing"),
    _llama("float32"),
    _llama("float16"),
    _llama("q8_0"),
    _llama("q4_0"),
    _llama(None),
    Contender(name="onnxruntime-float32", kind="onnxruntime", made=("onnx", "float32")),
    Contender(name="onnxruntime-int4", kind="onnxruntime", made=("onnx", "int4")),
    Contender(
        name="ctranslate2-float32", kind="ctranslate2", options={"format": "float32"}, made=("ctranslate2", "float32")
    ),
    Contender(name="ctranslate2-int8", kind="ctranslate2", options={"format": "int8"}, made=("ctranslate2", "int8")),
    # it reads GGUF files itself; an export from transformers would need releases of its own
    Contender(name="openvino-float16", kind="openvino", kv_bytes_per_element=1, made=("gguf", "float16")),
    Contender(name="openvino-q8_0", kind="openvino", kv_bytes_per_element=1, made=("gguf", "q8_0")),
    Contender(name="openvino-q4_0", kind="openvino", kv_bytes_per_element=1, made=("gguf", "q4_0")),
)


def choose(names: str | None) -> tuple[Contender, ...]:
    """The contenders that a comma-separated list names, all without one; the reference is always among them.

    A name that begins with `llminfer+` is a setting of ours, spelled out.

    Raises:
        UsageError: for a name that is none, with those that are.
    """
    rows = {contender.name: contender for contender in CONTENDERS}
    wanted = [name.strip() for name in names.split(",") if name.strip()] if names is not None else list(rows)
    chosen = {REFERENCE: rows[REFERENCE]}
    for name in wanted:
        chosen[name] = _spelled_out(name) if name.startswith("llminfer+") else rows.get(name) or _unknown(name)
    return tuple(chosen.values())


def _spelled_out(name: str) -> Contender:
    options: dict[str, object] = {}
    for item in name.split("+")[1:]:
        key, equals, value = item.partition("=")
        if key not in _OURS or not equals:
            raise UsageError(f"{name}: {item} is no setting", hint=f"settings: {', '.join(_OURS)}, each with =value")
        options[key] = value if key != "compiled" else value == "true"
    return _ours(name, **options)


def _unknown(name: str) -> Contender:
    known = ", ".join(contender.name for contender in CONTENDERS)
    raise UsageError(f"no contender is called {name}", hint=f"known: {known}; or llminfer+weights=int8+cache=static")
