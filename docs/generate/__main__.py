"""Writes the generated pages and the marked figures of docs/.

python -m docs.generate
"""

from __future__ import annotations

from docs.generate import figures
from docs.generate.figures import DOCS
from docs.generate.pages import PAGES


def main() -> None:
    """Writes every page that differs, and prints its name."""
    pages = {DOCS / name: render() for name, render in PAGES.items()}
    pages |= {path: figures.filled(path.read_text(encoding="utf-8")) for path in figures.guides()}
    for path, text in pages.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
