"""Figures that are composed and not rendered."""


def leave_undrawn(monkeypatch):
    """Compose figures without rendering them, which takes most of a report's time."""
    from matplotlib.figure import Figure

    def save(_, file, *, format, **options):
        svg = '<svg viewBox="0 0 1 1"><path d="M0 0"/></svg>'
        file.write(b"\x89PNG" if format == "png" else svg)

    monkeypatch.setattr(Figure, "savefig", save)
