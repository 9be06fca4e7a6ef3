"""The command `tasks`."""

from __future__ import annotations

from rope_patch.cli.options import option
from rope_patch.cli.runtime import requires_extra


def tasks(
    path: bool = option(False, "Print their folder, for lm_eval --include_path.", "--path"),
) -> None:
    """List the retrieval tasks that eval and lm-eval take.

    \b
    Examples:
      rope-patch tasks
      lm_eval --include_path "$(rope-patch tasks --path)" --tasks rp_niah_single_2 ...
    """
    from rope_patch import tasks

    if path:
        print(tasks.FOLDER)
        return
    with requires_extra("the tasks need", "eval"):
        groups, names = tasks.groups(), tasks.names()
    for name in names:
        print(name)
    for group, members in groups.items():
        print(f"{group}: {', '.join(members)}")
