"""Python frames out of the text of stacks and tracebacks. Pure: text goes in, frames come out.

Reads   what faulthandler or a traceback wrote.
Writes  nothing.
Never   a file, a module: what is a library is told by its path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outlive.places import file_name

_LINE = re.compile(r'^ *File "(?P<path>[^"]*)", line (?P<line>\d+|\?\?\?)(?: in|, in) (?P<function>.*)$')
_LIBRARY = re.compile(r"/lib(64)?/python3|/site-packages/|/dist-packages/|^<frozen")
_OWN = re.compile(r"/outlive/(?:_\w+|engines|launch|loader|pool)/")


@dataclass(frozen=True)
class Frame:
    path: str
    line: str
    function: str

    @property
    def file(self) -> str:
        return file_name(self.path)

    @property
    def words(self) -> str:
        """«dataset.py:88 decode»."""
        return f"{self.file}:{self.line} {self.function}"

    @property
    def is_own(self) -> bool:
        """Whether it is outlive's."""
        return _OWN.search(self.path) is not None

    @property
    def is_users(self) -> bool:
        return not self.is_own and _LIBRARY.search(self.path) is None


def of_stack(stack: str) -> list[Frame]:
    """The frames of the thread that wrote the last of these stacks, the innermost first."""
    _, _, after = stack.rpartition("Current thread ")
    lines = after.splitlines()[1:]
    frames = []
    for line in lines:
        frame = _frame(line)
        if frame is None:
            break
        frames.append(frame)
    return frames


def of_traceback(text: str) -> list[Frame]:
    """The frames of the last traceback in a text, the outermost first."""
    _, _, last = text.rpartition("Traceback (most recent call last):")
    return [frame for line in last.splitlines() if (frame := _frame(line)) is not None]


def nearest_users(frames: list[Frame]) -> Frame | None:
    """The first frame of the user's own code; any that is not outlive's where there is none."""
    others = [frame for frame in frames if not frame.is_own]
    return next((frame for frame in others if frame.is_users), others[0] if others else None)


def _frame(line: str) -> Frame | None:
    found = _LINE.match(line)
    return Frame(found["path"], found["line"], found["function"].strip()) if found else None
