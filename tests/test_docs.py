"""The documentation says what the code does."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llminfer.cli.app import COMMANDS
from llminfer.cli.help import ALIASES
from scripts.write_cli_docs import PAGE, help_of, page
from tests.parity import CANNOT_RUN, IMAGE_TEXT_TYPES, ONE_AFTER_ANOTHER

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def standard_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_the_page_of_the_command_line_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python scripts/write_cli_docs.py"


def test_every_option_named_in_the_readme_exists() -> None:
    known = "\n".join(help_of(name) for name in COMMANDS)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    # options of other programs that the examples call
    foreign = {"--no-deps", "--editable"}
    aliases = {alias for names in ALIASES.values() for alias in names}
    assert named - foreign - aliases <= set(re.findall(r"--[a-z][a-z-]+", known)) | {"--help", "--version"}


def test_the_two_commands_of_the_readme_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make (\w+)`?", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_links_lead_somewhere() -> None:
    for file in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\(([^)#]+)", file.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (file.parent / link).exists(), f"{file.name}: {link}"


def test_the_parity_page_has_a_row_for_every_architecture_and_states_its_versions() -> None:
    text = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^(transformers|torch)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert f"transformers {pinned['transformers']} and torch {pinned['torch']}" in text
    assert version("transformers") == pinned["transformers"], "make test installs the pinned versions"
    causal, image_text = text.split("## Image-text models")
    rows = re.findall(r"^\| (\S+) \| (yes|no) \|(.*)\|$", causal, re.MULTILINE)
    assert [name for name, _, _ in rows] == [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    assert {name for name, ran, _ in rows if ran == "no"} == {*CANNOT_RUN}
    assert {name for name, _, rest in rows if "one after another" in rest} == {*ONE_AFTER_ANOTHER}
    assert re.findall(r"^\| (\S+) \| yes \|", image_text, re.MULTILINE) == [*IMAGE_TEXT_TYPES]
    assert "**no**" not in text
