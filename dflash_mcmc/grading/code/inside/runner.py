"""What the interpreter behind the walls runs: the program on stdin, and then one word to the grader of how it ended.

`python -I -S -B -c SOURCE DESCRIPTOR ENTRY_POINT`. The first line on stdin is the nonce, which is written to the descriptor
only once the program has come to its end; otherwise `!`, the kind of failure and the name of the exception are.
"""

import os
import sys


def run(descriptor, entry_point):
    """Runs the program and ends the process."""
    nonce, _, program = sys.stdin.buffer.read().partition(b"\n")
    silence = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(silence, standard)
    try:
        code = compile(program.decode("utf-8", "surrogatepass"), "program", "exec")
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        os.write(descriptor, b"!syntax_error " + type(error).__name__.encode())
        os._exit(1)
    reserve = [bytearray(1 << 22)]  # for the words below, where the program has used up the rest
    say, leave, find_kind = os.write, os._exit, kind  # the program can replace what modules hold
    try:
        exec(code, {})  # as HumanEval does: `if __name__ == "__main__":` is not run
    except BaseException as error:
        reserve.clear()
        word = "!" + find_kind(error, entry_point) + " " + type(error).__name__[:60]
        say(descriptor, word.encode("utf-8", "replace"))
        leave(1)
    else:
        say(descriptor, nonce)
        leave(0)


def kind(error, entry_point):
    """`missing_definition` where the tests do not find the function, `failed_test`, or `raised`."""
    if isinstance(error, AssertionError):
        return "failed_test"
    outermost = error.__traceback__.tb_next
    if isinstance(error, NameError) and error.name == entry_point and (outermost is None or outermost.tb_next is None):
        return "missing_definition"
    return "raised"


run(int(sys.argv[1]), sys.argv[2])
