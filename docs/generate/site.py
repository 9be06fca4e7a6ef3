"""MkDocs hooks: README as the home page, the API reference, and linked files of the repository.

Pages link to reports, tasks and recipes outside docs/, as code hosts show them. The site takes
these files along, so that the links work there, too. A link to a file that does not exist stays
as it is, and `mkdocs build --strict` fails.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import reference

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCED = re.compile(r"(```.*?```)", flags=re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home page, the reference, and every file that a page links to."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "reference.md", content=reference.render()))
    queue = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(queue)
    while queue:
        for _, target, _ in _links(queue.pop()):
            if target in seen or not (ROOT / target).is_file():
                continue
            seen.add(target)
            if not target.startswith("docs/"):
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
                queue.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the site's own paths; a link to a folder becomes plain words."""
    site = page.file.src_uri
    source = _repository_path(site)
    parts = _FENCED.split(markdown)
    parts[::2] = [
        _LINK.sub(lambda link: _moved(link, source, site), _without_folders(part, source))
        for part in parts[::2]
    ]
    return "".join(parts)


def _links(source: str) -> list[tuple[str, str, str]]:
    """Return (link, repository path, anchor) of each relative link of a Markdown file."""
    path = ROOT / source
    if path.suffix != ".md" or not path.is_file():
        return []
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    return [
        (link, _resolve(source, link), anchor)
        for _, link, anchor in _LINK.findall(text)
        if not link.startswith(("http://", "https://"))
    ]


def _moved(link: re.Match[str], source: str, site: str) -> str:
    before, path, after = link.groups()
    target = _resolve(source, path)
    if path.startswith(("http://", "https://")) or not (ROOT / target).is_file():
        return link[0]
    relative = posixpath.relpath(_site_path(target), posixpath.dirname(site) or ".")
    return f"{before}{relative}{after}"


def _without_folders(text: str, source: str) -> str:
    """Keep the words of links to folders, which a site cannot show."""
    return re.sub(
        r"(?<!!)\[([^]]*)\]\(([^)\s#]+)\)",
        lambda link: link[1] if (ROOT / _resolve(source, link[2])).is_dir() else link[0],
        text,
    )


def _resolve(source: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _site_path(target: str) -> str:
    if target == "README.md":
        return "index.md"
    path = PurePosixPath(target)
    return str(path.relative_to("docs")) if path.is_relative_to("docs") else target


def _repository_path(site: str) -> str:
    if site == "index.md":
        return "README.md"
    return f"docs/{site}" if (ROOT / "docs" / site).is_file() else site
