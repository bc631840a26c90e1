"""Writes the measured numbers of README.md and docs/*.md, and their pictures, from result files.

A page says what it wants between two comments, which are not shown:

    <!-- numbers: kernels results/h200/kernels.json -->
    a table
    <!-- end of numbers -->

A maker below, result files, and parameters such as loads=4096+64/64; case.heads=16,64 leaves out cases with other
numbers of heads. An example inside a code fence is left alone.
"""

import argparse
import difflib
import re
from pathlib import Path

from serving_benchmarks.options import Refused
from serving_benchmarks.results import kinds
from serving_benchmarks.results.file import NotUnderstood, Report, replace

ROOT = Path(__file__).parents[2]
MAKERS = {maker: kind for kind, described in kinds.KINDS.items() for maker in described.makers}
"""What a page can ask for, and of which kind the files have to be."""
DEEP = ("results/h100/throughput_h16_deep.json", "results/h100/throughput_h128_deep.json")
PICTURES = {"docs/speed.png": ("heat_map", "results/h200/kernels.json"), "docs/gains.png": ("gains", *DEEP)}
"""Functions of pictures.py, and the files that they draw."""
MARKED = re.compile(r"(?<=<!-- numbers: )(?P<what>[^<>]*?) -->(?P<text>.*?)<!-- end of numbers -->", re.DOTALL)
FENCED = re.compile(r"^[ \t]*```.*?^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
CASE = "case."
MARK = re.compile(r"<!-- (?:numbers:|end of numbers)")


def rewritten(page: Path) -> str:
    """The text of a page with the numbers that the files have now. Raises Refused."""
    text, parts, done = page.read_text(), [], 0
    marks = FENCED.sub(lambda fenced: re.sub(r"[^\n]", " ", fenced[0]), text)
    blocks = list(MARKED.finditer(marks))
    if len(MARK.findall(marks)) != 2 * len(blocks):
        raise Refused(f"{page.relative_to(ROOT)}: a mark without its other half")
    for block in blocks:
        where = f"{page.relative_to(ROOT)}, line {text.count(chr(10), 0, block.start()) + 1}"
        made = make(block["what"], page.parent, where)
        if MARK.search(made):
            raise Refused(f"{where}: the text of a result file has a mark in it")
        parts += [text[done : block.start("text")], f"\n{made.strip()}\n"]
        done = block.end("text")
    return "".join([*parts, text[done:]])


def make(what: str, folder: Path, where: str) -> str:
    """The text of one block. Raises Refused: the text names the page, the line and what is wrong."""
    maker, *words = what.split() or [""]
    if maker not in MAKERS:
        raise Refused(f"{where}: {maker!r} is not one of {', '.join(MAKERS)}")
    parameters = dict(word.split("=", 1) for word in words if "=" in word)
    only = {name: parameters.pop(name) for name in [*parameters] if name.startswith(CASE)}
    names = [word for word in words if "=" not in word]
    if not names:
        raise Refused(f"{where}: {maker} names no result file")
    try:
        reports = [_report(name, MAKERS[maker], only, (ROOT, folder)) for name in names]
        return kinds.KINDS[MAKERS[maker]].makers[maker](*reports, **parameters)
    except NotUnderstood as error:
        raise Refused(f"{where}: {error}") from None
    except kinds.LACKS as error:
        raise Refused(f"{where}: {maker} can't be made of {' '.join(words)}: {error!r}") from error


def _report(name: str, kind: str, only: dict[str, str], folders: tuple[Path, ...]) -> Report:
    """A file's report, with the entries whose cases have one of the values of each name. Raises NotUnderstood."""
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        raise NotUnderstood(f"there is no {name}")
    file = kinds.load(path)
    if file.kind != kind:
        raise NotUnderstood(f"{name} is of {file.kind}, not of {kind}")
    wanted = [(name.removeprefix(CASE), values.split(",")) for name, values in only.items()]
    results = [entry for entry in file.results if all(str(entry["case"][name]) in of for name, of in wanted)]
    if not results:
        raise NotUnderstood(f"no case has {', '.join(map('='.join, only.items()))}")
    return {**file.report, "results": results}


def redrawn(name: str, check: bool) -> bool:
    """Draws a picture if it does not show what its files have. Returns whether it did not."""
    target, drawer, sources = ROOT / name, PICTURES[name][0], [ROOT / source for source in PICTURES[name][1:]]
    if not all(source.is_file() for source in sources):
        return False
    from serving_benchmarks.results import pictures

    try:
        figure, numbers = getattr(pictures, drawer)(*(kinds.load(source).report for source in sources))
    except kinds.LACKS as error:
        raise Refused(f"{name} can't be made of {', '.join(PICTURES[name][1:])}: {error}") from error
    # a text chunk of a PNG is its keyword, a zero and the text
    if target.is_file() and f"{pictures.NUMBERS}\0{numbers}".encode() in target.read_bytes():
        return False
    if not check:
        replace(target, pictures.png(figure, numbers))
    return True


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something differs")


def run(options: argparse.Namespace) -> int:
    if not (ROOT / "README.md").is_file():
        raise Refused("the pages are in the source tree, not in the installed package")
    texts = {page: rewritten(page) for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
    changed = [page for page, text in texts.items() if text != page.read_text()]
    for page in changed:
        name = str(page.relative_to(ROOT))
        if options.check:
            lines = page.read_text().splitlines(), texts[page].splitlines()
            print(*difflib.unified_diff(*lines, f"{name} as it is", f"{name} as measured", lineterm="", n=0), sep="\n")
        else:
            replace(page, texts[page])
            print(f"{name} rewritten")
    drawn = [name for name in PICTURES if redrawn(name, options.check)]
    for name in drawn:
        print(f"{name} {'differs' if options.check else 'redrawn'}")
    if not changed and not drawn:
        print(f"all numbers of {len(texts)} pages are those of the result files")
    return 1 if (changed or drawn) and options.check else 0
