"""Completion for the shells, and the scripts that ask for it."""

from __future__ import annotations

import os

from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete, split_arg_string


class Bash(BashComplete):
    """Completion for bash, which also completes words with a colon or an equals sign.

    bash splits ``cuda:1`` into three words, and replaces only the last one. So this splits the line itself, like a
    shell, and removes the part of each value up to the last such sign.
    """

    source_template = """\
%(complete_func)s() {
    local response type value word before
    word="${COMP_LINE:0:COMP_POINT}"
    before=""
    case "$COMP_WORDBREAKS" in *[:=]*)
        before="${word##*[[:space:]]}"
        case "$before" in
            *[:=]*) before="${before%%"${before##*[:=]}"}" ;;
            *) before="" ;;
        esac ;;
    esac
    COMPREPLY=()
    response=$(env COMP_WORDS="$word" %(complete_var)s=bash_complete "$1" 2>/dev/null)
    while IFS=',' read -r type value; do
        case "$type" in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                value="${value#"$before"}"
                [[ $value == *= ]] && compopt -o nospace
                printf -v value %%q "$value"
                COMPREPLY+=("$value") ;;
        esac
    done <<< "$response"
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)
        incomplete = words.pop() if len(words) > 1 and not line[-1:].isspace() else ""
        return words[1:], incomplete


SHELLS: dict[str, type[ShellComplete]] = {"bash": Bash, "zsh": ZshComplete, "fish": FishComplete}
