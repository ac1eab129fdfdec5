"""What a command's options are called and how its help shows them: groups, other programs' words, and near misses."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

# other programs' names for options of ours that mean the same; the help shows ours
ALIASES: Mapping[str, tuple[str, ...]] = {
    "--max-new-tokens": ("--max-tokens", "--n-predict"),
    "--temperature": ("--temp",),
    "--system": ("--system-prompt",),
    "--draft": ("--draft-model",),
    "--prompt-cache": ("--prompt-cache-file",),
    "--kv-window": ("--max-kv-size",),
    "--model": ("--model-id",),
    "--seed": ("--random-seed",),
}
# what people mean by options that we have under another name and with another form
MEANT: Mapping[str, str] = {
    "--num-predict": "--max-new-tokens",
    "--n-tokens": "--max-new-tokens",
    "--length": "--max-new-tokens",
    "--file": "--prompt-file",
    "--input": "--prompt-file",
    "--ctx-size": "--kv-window",
    "--max-model-len": "--tokens",
    "--context-length": "--tokens",
    "--ctx": "--tokens",
    "--kv-cache-dtype": "--dtype",
    "--tensor-parallel-size": "--tp",
    "--top": "--top-k",
    "--repeat-penalty": "--repetition-penalty",
    "--no-cache": "--cache none",
    "--silent": "--quiet",
}
MEANT_COMMANDS: Mapping[str, str] = {
    "run": "generate",
    "complete": "generate",
    "ask": "generate",
    "talk": "chat",
    "size": "kv-size",
    "kv": "kv-size",
    "kvsize": "kv-size",
}
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": ("--model", "--revision", "--tokenizer", "--device", "--dtype", "--allow-pickle", "--trust-remote-code"),
    "Prompt": ("--prompt", "--prompt-file", "--system", "--raw", "--prompts", "--batch-size", "--load"),
    "Sampling": (
        *("--temperature", "--top-k", "--top-p", "--min-p", "--typical-p", "--repetition-penalty"),
        *("--presence-penalty", "--frequency-penalty", "--logit-bias", "--bad-words", "--logprobs", "--seed"),
        "--num-samples",
    ),
    "Stopping": ("--max-new-tokens", "--min-new-tokens", "--stop", "--ignore-eos", "--max-time"),
    "Cache": ("--cache", "--kv-bits", "--kv-window", "--prefill-chunk", "--prompt-cache"),
    "Memory": (),
    "Speed": ("--weights", "--engine", "--compile", "--threads", "--speculate", "--draft", "--draft-tokens"),
    "Output": (),  # all others
}
# where the same words mean a cache's element type, and bytes to subtract
_OF_THE_CALCULATOR: Mapping[str, tuple[str, ...]] = {
    "Model": ("--layers", "--kv-heads", "--head-dim", "--list"),
    "Cache": ("--tokens", "--batch", "--dtype", "--k-dtype", "--v-dtype", "--runtime", "--tp"),
    "Memory": ("--memory", "--weights", "--reserve"),
}


def main_name(parameter: Any) -> str:
    """What a parameter is called: an option's first long name."""
    names: list[str] = parameter.opts
    return next((name for name in names if name.startswith("--")), names[0])


class HelpfulCommand(TyperCommand):
    """A command that knows other programs' words and groups its options by what they are about."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for parameter in self.params:
            parameter.opts.extend(ALIASES.get(main_name(parameter), ()))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then the options of each group."""
        sections: dict[str, list[Any]] = {"Arguments": [], **{f"{group} options": [] for group in GROUPS}}
        groups = {**GROUPS, **_OF_THE_CALCULATOR} if self.name == "kv-size" else GROUPS
        for parameter in self.get_params(ctx):
            shown = copy.copy(parameter)
            name = main_name(parameter)
            shown.opts = [each for each in parameter.opts if each not in ALIASES.get(name, ())]
            record = shown.get_help_record(ctx)
            group = next((group for group, names in groups.items() if name in names), "Output")
            if record is not None:
                sections["Arguments" if parameter.param_type_name == "argument" else f"{group} options"].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def nearest_option(name: str, parameters: Sequence[Any]) -> str | None:
    """The option that was meant, by meaning before spelling; None when nothing is near."""
    known = {main_name(parameter): parameter.opts for parameter in parameters if parameter.param_type_name == "option"}
    meant = MEANT.get(name)
    if meant is not None and meant.split()[0] in known:
        return meant
    names = [each for names in known.values() for each in names if each.startswith("--")]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return next((option for option, names in known.items() if near and near[0] in names), None)


def nearest_command(name: str, commands: Sequence[str]) -> str | None:
    """The command that was meant, by meaning before spelling; None when nothing is near."""
    near = difflib.get_close_matches(name, commands, n=1, cutoff=0.6)
    return MEANT_COMMANDS.get(name) or (near[0] if near else None)
