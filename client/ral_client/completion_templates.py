"""The fixed parts of the completion scripts; completion.py fills in what the client takes. Percent signs are
doubled."""

BASH = """\
# Completion of ral for bash: . <(ral completion bash)

_ral_words() {
    local IFS=$'\\n'
    COMPREPLY+=($(IFS=' '; compgen -W "$1" -- "$2"))
}

_ral_sessions() {
    %(list)s |
        while read -r id _; do [[ $id == ID ]] || printf '%%s ' "$id"; done
}

_ral_complete() {
    local kind=$1 current=$2 first=$3
    case $kind in
        directory) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$current") ;;
        file) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
        user) mapfile -t COMPREPLY < <(compgen -u -- "$current") ;;
        signal) _ral_words '%(signals)s' "$current" ;;
        session) _ral_words "$(_ral_sessions)" "$current" ;;
        session-or-file)
            compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$current")
            [[ $first ]] && _ral_words "$(_ral_sessions)" "$current" ;;
        command) mapfile -t COMPREPLY < <(compgen -c -- "$current") ;;
    esac
}

_ral() {
    local current=${COMP_WORDS[COMP_CWORD]} verb=${COMP_WORDS[1]} at=2 word value= operands=0
    local options= valued= kind= sub= ended=
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        _ral_words "%(commands)s --help --version" "$current"
        return
    fi
    case $verb in
%(choices)s
    esac
    if [[ $sub ]]; then
        if ((COMP_CWORD == 2)); then
            _ral_words "$sub --help" "$current"
            return
        fi
        verb="$verb ${COMP_WORDS[2]}" at=3
    fi
    case $verb in
%(verbs)s
        *) return ;;
    esac
    # "=" is a word of its own to readline.
    for ((; at < COMP_CWORD; at++)); do
        word=${COMP_WORDS[at]}
        if [[ $value ]]; then
            [[ $word == = ]] || value=
        elif [[ $word == -- && ! $ended ]]; then
            ended=1
        elif [[ $word == --* && ! $ended ]]; then
            [[ " $valued " == *" ${word#--} "* ]] && value=${word#--}
        elif [[ $word != -* || $ended ]]; then
            operands=$((operands + 1))
            if [[ $verb == run ]]; then
                # From here on it is a command line of its own.
                if declare -F _command_offset >/dev/null; then
                    _command_offset "$at"
                else
                    _ral_complete file "$current"
                fi
                return
            fi
        fi
    done
    if [[ $value ]]; then
        [[ $current == = ]] && current=
        case $value in
%(values)s
        esac
    elif [[ $current == -* && ! $ended ]]; then
        _ral_words "$options" "$current"
    elif ((operands == 0)); then
        _ral_complete "$kind" "$current" first
    elif [[ $kind == session-or-file ]]; then
        _ral_complete file "$current"
    fi
}

complete -F _ral ral
"""


ZSH = """\
#compdef ral
# Completion of ral for zsh: ral completion zsh > a directory of $fpath, named _ral

_ral_sessions() {
    local -a ids
    ids=(${${(f)"$(%(list)s)"}[2,-1]%%%% *})
    _describe -t sessions session ids
}

_ral_session_or_file() {
    _alternative 'sessions:session:_ral_sessions' 'files:path:_files'
}

_ral() {
    local -a commands words_after
    local curcontext=$curcontext state line
    commands=(
%(commands)s
    )
    _arguments -C '(- *)'{-h,--help}'[list the commands]' '(- *)'{-V,--version}'[print the version]' \\
        '1:command:->command' '*::argument:->argument'
    case $state in
        command) _describe -t commands command commands ;;
        argument)
            case $line[1] in
%(verbs)s
            esac ;;
    esac
}

if [[ $funcstack[1] == _ral ]]; then _ral "$@"; else compdef _ral ral; fi
"""


FISH = """\
# Completion of ral for fish: ral completion fish | source

function __ral_sessions
    %(list)s | string match -rv '^ID ' | string replace -r '^(\\S+)\\s.*' '$1'
end

# Whether the command line is at an operand of a command: ral COMMAND [WORD] …
function __ral_at
    set -l words (commandline -opc)
    set -e words[1]
    for wanted in $argv
        test "$words[1]" = "$wanted"; or return 1
        set -e words[1]
    end
end

# Whether ral run has its command already: the rest is a command line of its own.
function __ral_ran
    set -l words (commandline -opc)
    test (count $words) -ge 3; and test "$words[2]" = run; or return 1
    set -l value 0
    for word in $words[3..-1]
        if test $value = 1
            set value 0
        else if contains -- $word %(valued)s
            set value 1
        else if test $word = --; or not string match -q -- '-*' $word
            return 0
        end
    end
    return 1
end

complete -c ral -f
complete -c ral -n 'test (count (commandline -opc)) = 1' -s h -l help -d 'list the commands'
complete -c ral -n 'test (count (commandline -opc)) = 1' -s V -l version -d 'print the version'
"""
