"""Helpers for the whole package: files, errors, checksums, progress and processes."""

from rope_patch.utils.front import front

front(
    __name__,
    {
        "atomic_files": "NotWritten add_write_advice atomic_write explain_write_errors "
        "require_writable_file require_writable_folder",
        "checksums": "add_checksum digest file_sha256 json_digest seal unseal verify_checksum",
        "errors": "describe_error did_you_mean one_line",
        "escaping": "escape_markdown markdown_block markdown_code markdown_prose printable",
        "figure_file": "render_figure",
        "journal": "JournalFile check_lines",
        "notebook": "text_html",
        "plain_text": "align format_duration",
        "plot_style": "PALETTE",
        "processes": "Processes",
        "progress": "progress_bar",
        "provenance": "config_fingerprint fingerprint",
        "versions": "version",
    },
)
