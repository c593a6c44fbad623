# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A shell script's commands get the words that bash gives them."""

import os
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from megatron_asynchzp.commands.shell_script import ShellScript, open_variables, with_numbers
from megatron_asynchzp.errors import ConfigurationError

# A program that writes down its words, and one that starts another.
TRAINER = "#!/bin/bash\nprintf '%s\\n' torchrun \"$@\" >> $WORDS\n"
SRUN = '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n'


def words_of_bash(text: str, folder: Path) -> list[str]:
    """What each torchrun gets that the script starts, below its own name."""
    for name, program in (("torchrun", TRAINER), ("srun", SRUN)):
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "WORDS": str(folder / "words")}
    subprocess.run(["bash", "-c", text], env=env, cwd=folder, capture_output=True, timeout=20)
    return (folder / "words").read_text().splitlines()


SCRIPTS = {
    "arrays": """
        A=(
          --num-layers 2   # a comment with ' and )
          # --hidden-size 1 \\
          --lr 1e-3
        )
        A+=(--bf16) ; B=("${A[@]}" --split '9 9' --seed 1)
        torchrun a.py "${B[@]}" ${A[0]} "${A[1]}" ${B[@]} "${B[*]}"
        """,
    "texts of many lines": """
        ARGS="
            --num-layers 2 \\
            --hidden-size 64
            --bf16 \\
        "
        export MORE="$ARGS --lr 1e-3" LESS=
        MORE="$MORE --seed 1"; MORE+=" --fp16"
        torchrun a.py $MORE $LESS "$LESS" --name "a b" --other 'c d'
        """,
    "comments": """
        A=1
        # torchrun b.py --fp16 \\
        torchrun a.py --bf16 --tag a#b --url http://x/#y "$A"# \\
          `# --seed 1` --last $(# a comment
          ) --lr 1 # --seed 2 \\
        # it's the end
        """,
    "defaults": """
        : ${TP:=2} "${PP=4}"
        LR=${LR:-${BASE:-1e-3}}
        EMPTY=
        torchrun a.py --tp ${TP} --pp $PP --lr=$LR ${E-x} ${EMPTY-y} ${EMPTY:-z w} "${U:-a b}" \\
           "${U:-"c d"}" \\
           ${MORE:---cuda-graph-impl local} ${TP:+--set} ${U:+--unset} ${U+--unset}
        """,
    "numbers": """
        GPUS=8; NODES=4 TP=2
        WORLD=$((GPUS*NODES))
        torchrun a.py --dp $(( $WORLD / (TP * 2) )) --n=$((WORLD % 5 - 1)) --gbs=$((${GPUS} + 2))
        """,
    "texts that are no commands": """
        cat > x.sh <<EOF
        torchrun b.py --fp16
        EOF
        cat <<-'END' >/dev/null 2>&1
        it's --fp16
        END
        echo "torchrun b.py --fp16"
        torchrun a.py --bf16 > log.txt 2>&1 && echo done || exit 1
        torchrun a.py --seed 2 2>err.txt | tee -a log.txt
        """,
    "commands in a text": """
        DIR=/x
        CMD="torchrun $DIR/a.py --bf16 --name \\"a b\\""
        srun -l --ntasks=4 bash -c "$CMD --seed 1"
        eval "$CMD --lr 1"
        eval torchrun a.py --eval; (exec torchrun a.py --exec)
        A=1 exec bash -c 'torchrun a.py --seed '"$DIR"' --last'
        """,
    "functions and branches": """
        train() {
            local FLAGS=(--bf16 --lr 1e-3)  # read here, run below
            torchrun a.py "${FLAGS[@]}"
        }
        if [[ -n "a" && "a" == "a" ]]; then declare -a X=(--on); fi
        case x in x) Y=1 ;; esac
        train; for option in --bf16 --x; do
            case $option in
                torchrun|-h) exit ;;
                --bf16|--fp16) torchrun a.py --in-case ;;
            esac
        done
        torchrun a.py ${X[*]} "${X[*]} b" $Y
        """,
    "odd quotes": r"""
        torchrun a.py --pattern 'M*-' --json '{"a": [1, 2]}' --escaped a\ b \$HOME "\$X" "a\b"
        torchrun "--name" 'it'"'"'s' --glue"d"=1 "a 'b' c" "" ''
        torchrun "a\
        b" --gl\
ue 'c\d'
        """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_commands_get_the_words_that_bash_gives_them(name, tmp_path):
    text = dedent(SCRIPTS[name])
    expected = words_of_bash(text, tmp_path)
    found = [words for words in ShellScript(text, "s").commands if words[0] == "torchrun"]
    assert [word for words in found for word in words] == expected


def test_what_nothing_sets_is_open_by_its_name_and_1_stands_for_it():
    text = """
    TP=$1; NN=$(nvidia-smi -L | wc -l)
    torchrun a.py --seed $SEED --li=$LI --n $((TP*2)) --nn ${NN} --x ${A%.*} "${B[@]:1}" '$C'
    """
    (words,) = ShellScript(text, "s").commands
    names = ["$((TP*2))", "$(nvidia-smi -L | wc -l)", "$LI", "$SEED", "${A%.*}", "${B[@]:1}"]
    assert open_variables(words) == names
    expected = "--seed 1 --li=1 --n 1 --nn 1 --x 1 1 $C"
    assert with_numbers(words) == ["torchrun", "a.py", *expected.split()]


def test_a_script_that_only_writes_another_is_read_for_it():
    text = "sbatch <<EOF\n#SBATCH -N 2\ntorchrun a.py \\\n --seed \\$S --lr 1\nEOF\nexit\n"
    commands = [with_numbers(words) for words in ShellScript(text, "s").commands]
    assert ["torchrun", "a.py", "--seed", "1", "--lr", "1"] in commands


@pytest.mark.parametrize("text", ["a 'b", 'torchrun "a.py --x 1', "x=`a"])
def test_a_quote_without_an_end_is_refused_with_its_line(text):
    with pytest.raises(ConfigurationError, match="^s.sh: a quote that has no end: ") as refused:
        ShellScript(f"echo 'a\nb' # it's\n{text}\n", "s.sh")
    assert text in str(refused.value)
