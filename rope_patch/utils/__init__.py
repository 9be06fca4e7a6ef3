"""Help the whole package with files, errors, checksums, figures, plugins, processes, terminals."""

from rope_patch.utils.lazy_exports import export_lazily

export_lazily(
    __name__,
    {
        "atomic_files": (
            "add_write_advice atomic_write explain_write_errors NotWritten "
            "require_writable_file require_writable_folder"
        ),
        "checksums": ("add_checksum digest file_sha256 json_digest seal unseal verify_checksum"),
        "errors": (
            "describe_error did_you_mean escape_markdown markdown_block "
            "markdown_code markdown_prose one_line printable text_html"
        ),
        "figures": "PALETTE render_figure",
        "installation": "version",
        "processes": "Processes",
        "provenance": "config_fingerprint fingerprint",
        "terminal": "align format_duration never_silent progress_bar",
    },
)
