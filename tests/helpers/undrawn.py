"""Figures that are composed and not rendered."""

import io


def leave_undrawn(monkeypatch):
    """Compose figures without rendering them, which takes most of a report's time."""
    from matplotlib.figure import Figure

    def save(_, file, *, format, **options):
        drawn = b"\x89PNG" if format == "png" else b'<svg viewBox="0 0 1 1"><path d="M0 0"/></svg>'
        file.write(drawn.decode() if isinstance(file, io.TextIOBase) else drawn)

    monkeypatch.setattr(Figure, "savefig", save)
