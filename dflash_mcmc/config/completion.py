"""Completion of command lines in bash, for `python -m dflash_mcmc` and `dflash-mcmc`.

Hydra's own script completes `python FILE` and installed programs only, and changes COMP_WORDBREAKS for all programs.
"""

from __future__ import annotations

INSTALL = r"""_dflash_mcmc() {
    local line=${COMP_LINE:0:COMP_POINT} words ask rest word choices
    read -ra words <<< "$line"
    if [ "${words[0]##*/}" = dflash-mcmc ]; then
        ask=("${words[0]}")
    elif [ "${words[1]}" = -m ] && [ "${words[2]}" = dflash_mcmc ]; then
        ask=("${words[@]:0:3}")
    else
        return
    fi
    [ "${line: -1}" = " " ] && words+=("")
    [ ${#words[@]} -gt ${#ask[@]} ] || return
    rest="${words[*]:${#ask[@]}}"
    word="${words[-1]}"
    choices=$(COMP_LINE="dflash-mcmc $rest" COMP_POINT=$((12 + ${#rest})) "${ask[@]}" -sc query=bash 2> /dev/null) || return
    mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$word")
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then  # bash replaces only what follows the sign
        COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
    fi
}
complete -o nospace -o bashdefault -o default -F _dflash_mcmc python python3 dflash-mcmc"""

UNINSTALL = """complete -r python python3 dflash-mcmc
unset -f _dflash_mcmc"""
