"""The pages: their links lead somewhere, the files that they name exist, and their lines fit a screen. Docstrings and
comments: the names in them exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("asyncflow", "launcher", "workers", "tq", "weightsync", "configs", "examples", "benchmarks", "tests")
NAMES = [page.name for page in PAGES]
ELSEWHERE = {"my_rewards.py", "my_tools.py", "tq.py", "set_env.sh", "config.yaml"}
"""Files of users, vendors and runs that the pages speak of."""
COLUMNS = 120
PACKAGES = ("asyncflow", "launcher", "workers", "tq", "weightsync")
ADAPTERS = ("asyncflow/vendors.py", "weightsync/notify.py", "workers/engines/")
"""They name what others' programs have."""
OUTSIDE = {
    "_apply_scaling", "_get_resolved_checkpoint_files", "_new_process_group_helper", "add_bos_token",
    "all_special_ids", "compute_topk_kl", "DataLoader", "Dataset", "device_id", "dppo_kl", "dppo_tv", "DPPOTrainer",
    "ensure_running", "ForkServer", "Generator", "gpu001", "is_torch_npu_available", "LlamaForSequenceClassification",
    "MAX_ARG_STRLEN", "modeling_utils", "nohup", "permutation", "RotaryEmbedding", "torchrun",
    "use_attribute_docstrings", "wraps",
}  # fmt: skip
"""Names of libraries, commands and papers that docstrings and comments mention."""
_NOTE = re.compile(r'"""((?:.|\n)*?)"""|(#[^\n]*(?:\n *#[^\n]*)*)')
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _CODE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_anchors_of_a_page_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", _CODE.sub("", page.read_text()))
    broken = []
    for link in links:
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """A name may begin anywhere below the root."""
    named = re.findall(r"`([\w./-]+\.(?:py|sh|yaml))`", page.read_text())
    own = [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    assert [
        name for name in named if name not in ELSEWHERE and not any(path.endswith(f"/{name}") for path in own)
    ] == []


def test_every_path_of_the_architecture_page_exists() -> None:
    """Those in its figures, too; a file may follow its folder's first one."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    paths = re.findall(r"(?<![\w./-])(?:asyncflow|launcher|workers|tq|weightsync)(?:/\w+)+(?:\.py)?", page)
    assert len(paths) > 50
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_architecture_page_has_every_floor() -> None:
    floors = (ROOT / "docs" / "architecture.md").read_text().split("### Floors")[1].split("### Where")[0]
    named = set(re.findall(r"\w+", floors))
    rooms = {path.parent.name for package in ("launcher", "workers") for path in (ROOT / package).glob("*/__init__.py")}
    assert len(rooms) > 20
    assert rooms - named == set()


def test_names_in_docstrings_and_comments_exist() -> None:
    """In the code of some package; so a renamed function is renamed there, too."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    texts = {path.relative_to(ROOT): path.read_text() for path in files}
    known = OUTSIDE | {part for path in texts for part in path.with_suffix("").parts}
    known.update(*(re.findall(r"\w+", _NOTE.sub("", text)) for text in texts.values()))
    unknown = []
    for path, text in texts.items():
        if path.as_posix().startswith(ADAPTERS):
            continue
        for note in _NOTE.findall(text):
            line = re.sub(r"\s*\n\s*#?\s*", " ", "".join(note))
            for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`", line):
                if not re.match(r"step_\d", name) and not known.issuperset(name.split(".")):
                    unknown.append(f"{path}: {name}")
    assert len(texts) > 200
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_lines_of_prose_fit_a_screen(page: Path) -> None:
    """Tables, programs and what commands print are as long as they are."""
    if page.name == "configuration.md":  # is generated
        return
    lines = _CODE.sub("", page.read_text()).splitlines()
    assert [line for line in lines if len(line) > COLUMNS and not line.startswith(("|", "    "))] == []
