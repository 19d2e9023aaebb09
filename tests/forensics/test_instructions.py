"""Verdicts on instructions: real deaths in real workers, and synthetic incidents for what no machine here can do.

Each start method has one loader with every death in it, for starts are dear; each death is a test of its own, save
those by a missing feature: which ones there are depends on the CPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

import outlive
from forensics import illegal_instructions
from forensics.illegal_instructions import DEATHS, Death
from outlive import FaultPolicy, Incident, IncidentKind
from outlive._capture import blackbox, crash
from outlive._capture.blackbox import BlackBox
from outlive._forensics import autopsy, examine
from outlive._forensics.cpu import Cpu
from outlive._forensics.rules import instruction_remedies, instructions
from outlive.crashes import CrashRecord, Region
from outlive.evidence import CodePlace, Evidence, Examined, Instruction
from outlive.incident import Exit, InHand
from outlive.verdicts import Confidence, Name

pytest.importorskip("iced_x86", reason="the extra «forensics» is not installed")
pytest.importorskip("elftools", reason="the extra «forensics» is not installed")
needs_victims = pytest.mark.skipif(
    not crash.AVAILABLE or not illegal_instructions.can_compile(), reason="no recorder, no C compiler, or not x86-64"
)
METHODS = ("fork", "spawn")


class Dying(Dataset[int]):
    """Healthy samples, and between them one for each death."""

    def __init__(self, library: Path, missing: list[str]) -> None:
        self.library = str(library)
        self.missing = missing
        self.names = list(illegal_instructions.deaths_of(missing))

    def __len__(self) -> int:
        return 2 * len(self.names)

    def __getitem__(self, index: int) -> int:
        if index % 2:
            illegal_instructions.deaths_of(self.missing)[self.names[index // 2]].act(ctypes.CDLL(self.library))
        return index


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return illegal_instructions.build(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def missing() -> list[str]:
    return illegal_instructions.missing_here()


@pytest.fixture(scope="module", params=METHODS)
def died(request: pytest.FixtureRequest, library: Path, missing: list[str]) -> dict[str, Incident]:
    """Every death, once: its incident."""
    policy = FaultPolicy(on_error="skip", retries=0, max_bad=None, max_restarts=1000)
    dataset = Dying(library, missing)
    loader: outlive.DataLoader[Any] = outlive.DataLoader(
        dataset, batch_size=2, num_workers=2, multiprocessing_context=request.param, faults=policy
    )
    delivered = [int(index) for batch in loader for index in batch]
    assert delivered == list(range(0, len(dataset), 2))
    return {name: loader.quarantine[2 * place + 1] for place, name in enumerate(dataset.names)}


def assert_verdict(name: str, incident: Incident, death: Death, index: int) -> None:
    verdict = incident.verdict
    assert verdict is not None
    told = f"{name}: {verdict}"
    assert verdict.name is death.verdict, told
    assert verdict.confidence is death.confidence, told
    assert incident.signal == death.signal, told
    assert incident.indices == (index,), told
    for words in death.words:
        assert words in verdict.cause, told
    for words in death.facts:
        assert any(words in fact for fact in verdict.facts), told
    for words in death.remedies:
        assert any(words in remedy for remedy in verdict.remedies), told
    assert verdict.remedies, told
    assert not verdict.cause.endswith("."), told


@needs_victims
@pytest.mark.parametrize("name", DEATHS)
def test_a_death_by_an_instruction_is_explained(died: dict[str, Incident], name: str) -> None:
    """Which instruction, where, and why it killed; and in which sample."""
    assert_verdict(name, died[name], DEATHS[name], 2 * list(died).index(name) + 1)


@needs_victims
def test_the_missing_feature_is_named(died: dict[str, Incident], missing: list[str]) -> None:
    """For instructions that this very CPU refuses, in a library and in memory that a compiler at run time wrote."""
    wanting = {name: death for name, death in illegal_instructions.deaths_of(missing).items() if name not in DEATHS}
    assert len(wanting) == 2 * len(missing) >= 10

    for name, death in wanting.items():
        assert_verdict(name, died[name], death, 2 * list(died).index(name) + 1)


@needs_victims
def test_the_library_of_the_missing_feature_is_to_be_built_anew(died: dict[str, Incident], missing: list[str]) -> None:
    """It belongs to no package: what to change is its compiler's flags. Code made at run time was cached."""
    (in_library, in_page) = (died[f"{missing[0]} in {place}"].verdict for place in ("a library", "a page"))

    assert in_library is not None
    assert "without -march=native" in in_library.remedies[0]
    assert in_page is not None
    assert "compiled for another machine" in in_page.remedies[0]


@needs_victims
def test_the_caller_is_named(died: dict[str, Incident]) -> None:
    """ctypes called it, through libffi."""
    examined = died["trap"].evidence.examined

    assert examined is not None
    assert examined.cpu
    assert any("ffi" in frame.library for frame in examined.frames)


# ---------------------------------------------------------------- without a worker

TEXT = Region(0x7F0000000000, 0x7F0000100000, "r-xp", 0x1000, "/opt/lib/libx.so")
JITTED = Region(0x7E0000000000, 0x7E0000001000, "rwxp", 0, "")
PLACE = CodePlace(TEXT.start + 4, TEXT.path, 0x1004, "decode", 4)


def incident_of(
    record: CrashRecord | None, examined: Examined | None = None, signal: int = 4, last_words: str = ""
) -> Incident:
    evidence = Evidence(crash=record, examined=examined, recorder=record is not None, last_words=last_words)
    died_of = Exit(signal=record.signal if record is not None else signal)
    return Incident(IncidentKind.CRASH, 0, 0, 1, 0, InHand(), exit=died_of, evidence=evidence)


def record_of(
    signal: int = 4, code: int = 2, region: Region = TEXT, instruction: bytes = b"\x90" * 16, **more: Any
) -> CrashRecord:
    return CrashRecord(
        signal,
        code,
        1,
        1,
        architecture="x86_64",
        instruction_pointer=region.start + 4,
        instruction=instruction,
        regions=(region,),
        **more,
    )


def verdict_on(incident: Incident) -> Any:
    found = [verdict for verdict in (rule(incident) for rule in instructions.RULES) if verdict is not None]
    return found[0] if found else None


@pytest.mark.parametrize("number", [4, 5, 8, 31])
def test_a_signal_sent_by_a_process_is_left_to_other_rules(number: int) -> None:
    """No instruction is to blame."""
    assert verdict_on(incident_of(record_of(number, code=0, sender_pid=7))) is None


@pytest.mark.parametrize("access", [4, 6])
def test_a_read_or_a_write_is_left_to_others(access: int) -> None:
    """Only what was to be run is ours."""
    record = record_of(11, code=1, address=0, trap=14, fault_error=access)

    assert verdict_on(incident_of(record, Examined(PLACE, instruction=Instruction("mov rax,[rdi]", 3)))) is None


@pytest.mark.parametrize(
    ("start", "path", "words"),
    [
        (0x5592788F5000, "[heap]", "which is in the heap"),
        (0x7F66F4000000, "", "which is in the heap"),  # malloc's for a thread
        (0x7F66F4001000, "", "which is data"),
    ],
)
def test_a_jump_into_memory_of_malloc_is_told_from_one_into_other_data(start: int, path: str, words: str) -> None:
    """The arenas that malloc has for threads lie outside of «[heap]»."""
    region = Region(start, start + 0x400000, "rw-p", 0, path)
    record = record_of(11, code=2, region=region, address=start + 4, trap=14, fault_error=0x15)

    assert words in verdict_on(incident_of(record, Examined(PLACE))).cause


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (4, Name.CPU_FEATURE_MISSING),
        (5, Name.DELIBERATE_TRAP),
        (8, Name.ARITHMETIC_FAULT),
        (31, Name.FORBIDDEN_SYSTEM_CALL),
    ],
)
def test_a_signal_without_a_record_is_only_guessed_at(number: int, name: Name) -> None:
    """The recorder was not built: no compiler. Here there is one."""
    verdict = verdict_on(incident_of(None, signal=number))

    assert verdict.name is name
    assert verdict.confidence is not Confidence.CERTAIN
    assert number not in (4, 8) or verdict.remedies[0] == instruction_remedies.BUILD_RECORDER


@pytest.mark.parametrize(
    ("text", "features", "words", "confidence"),
    [
        ("tilezero tmm0", ("AMX_TILE",), "has not asked the kernel", Confidence.LIKELY),
        ("vaddps zmm0,zmm0,zmm0", ("AVX512F",), "claims to have and refuses", Confidence.POSSIBLE),
    ],
)
def test_a_feature_that_is_there_and_refused_is_told_so(
    text: str, features: tuple[str, ...], words: str, confidence: Confidence
) -> None:
    """AMX without leave: this needs a CPU with AMX. A CPU that lies: a virtual machine with different hosts."""
    examined = Examined(PLACE, instruction=Instruction(text, 5, features))

    verdict = verdict_on(incident_of(record_of(), examined))

    assert (verdict.name, verdict.confidence) == (Name.CPU_FEATURE_MISSING, confidence)
    assert words in verdict.cause


def test_bytes_in_a_library_may_be_newer_than_the_decoder() -> None:
    """APX or AVX10.2, for which there is no CPU yet."""
    code = bytes.fromhex("62f57c4858c0")
    examined = Examined(PLACE, instruction=Instruction(code.hex(" "), 0, is_valid=False))

    verdict = verdict_on(incident_of(record_of(instruction=code), examined))

    assert (verdict.name, verdict.confidence) == (Name.CPU_FEATURE_MISSING, Confidence.POSSIBLE)
    assert "AVX-512" in verdict.cause


@pytest.mark.parametrize(("code", "words"), [("62f17c4858c0", "AVX-512"), ("0f3dc0", "0f 3d c0")])
def test_an_instruction_is_guessed_at_without_a_decoder(code: str, words: str) -> None:
    """With advice on how to know more."""
    verdict = verdict_on(incident_of(record_of(instruction=bytes.fromhex(code)), Examined(PLACE)))

    assert (verdict.name, verdict.confidence) == (Name.CPU_FEATURE_MISSING, Confidence.POSSIBLE)
    assert words in verdict.cause
    assert "outlive[forensics]" in verdict.remedies[0]


def test_an_instruction_of_aarch64_is_named_and_its_feature_guessed_at() -> None:
    """No CPU of that kind here; its decoder does not tell what an instruction needs."""
    examined = Examined(PLACE, instruction=Instruction("ptrue p0.b", 4))
    record = dataclasses.replace(record_of(code=1), architecture="aarch64")

    verdict = verdict_on(incident_of(record, examined))

    assert (verdict.name, verdict.confidence) == (Name.CPU_FEATURE_MISSING, Confidence.POSSIBLE)
    assert "(ptrue p0.b) at decode+0x4 in libx.so" in verdict.cause
    assert not any("forensics" in remedy for remedy in verdict.remedies)


def test_nothing_is_made_up_about_code_when_there_are_no_maps() -> None:
    """No descriptor was left to read them: whether the code is in a library, nobody knows."""
    examined = Examined(CodePlace(0x1234), instruction=Instruction("vaddps", 4, ("AVX",), ("AVX",)))

    verdict = verdict_on(incident_of(dataclasses.replace(record_of(), regions=()), examined))

    assert verdict.cause == "vaddps at 0x1234 needs AVX, which this CPU has not got"
    assert verdict.remedies == ("use machines whose CPU has AVX (lscpu shows the flags)",)


def test_the_words_before_a_trap_are_its_cause() -> None:
    """A Rust panic says why, on standard error, and then runs ud2."""
    examined = Examined(PLACE, instruction=Instruction("ud2", 2, is_trap=True))
    where, what = "thread 'main' panicked at src/decode.rs:88:9:", "index out of bounds: the len is 3"
    words = f"loading\n{where}\n{what}\nnote: run with `RUST_BACKTRACE=1` to display a backtrace\n"

    verdict = verdict_on(incident_of(record_of(), examined, last_words=words))

    assert verdict.cause.endswith(f"on purpose: {where} {what}")
    assert verdict.remedies[0].startswith("RUST_BACKTRACE=1")


@pytest.mark.parametrize(
    ("library", "missing", "remedy"),
    [
        ("/v/site-packages/torch/lib/libtorch_cpu.so", ("AVX2",), "ATEN_CPU_CAPABILITY=default"),
        ("/v/site-packages/numpy.libs/libscipy_openblas64_-1.so", ("AVX512F",), "OPENBLAS_CORETYPE=Haswell"),
        ("/v/site-packages/numpy.libs/libscipy_openblas64_-1.so", ("AVX",), "OPENBLAS_CORETYPE=Nehalem"),
        ("/v/site-packages/numpy/_core/_multiarray_umath.so", ("AVX512F",), 'NPY_DISABLE_CPU_FEATURES="X86_V4 '),
        ("/v/site-packages/numpy/_core/_multiarray_umath.so", ("AVX2",), 'NPY_DISABLE_CPU_FEATURES="X86_V3 AVX2'),
        ("/v/site-packages/numpy/_core/_multiarray_umath.so", ("SSE4_1",), "-Dcpu-baseline=none numpy"),
        ("/v/site-packages/cv2/cv2.abi3.so", ("AVX",), "--no-binary opencv-python opencv-python"),
        ("/tmp/torchinductor_me/ab/cab.so", ("AVX2",), "rm -r /tmp/torchinductor_me/ab"),
        ("/opt/lib/libmkl_avx2.so.2", ("AVX2",), "MKL_ENABLE_INSTRUCTIONS=SSE4_2"),
        ("/opt/lib/libmine.so", ("BMI2",), "without -march=native"),
        ("", ("AVX2",), "compiled for another machine"),
    ],
)
def test_the_remedy_is_the_one_of_the_library(library: str, missing: tuple[str, ...], remedy: str) -> None:
    """Each has its own switch; most need a CPU that is older than this one to be seen."""
    found = instruction_remedies.for_missing_feature(CodePlace(1, library, is_mapped=True), missing)

    assert remedy in found[0]
    assert missing[0] in found[-1]


def test_an_autopsy_that_cannot_examine_still_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the record says by itself is enough for something."""
    monkeypatch.setattr(examine, "examine", lambda record: 1 / 0)
    record = record_of(31, code=1, system_call=162)

    judged = autopsy.perform(incident_of(record))

    assert judged.verdict is not None
    assert judged.verdict.name is Name.FORBIDDEN_SYSTEM_CALL
    assert "system call 162" in judged.verdict.cause


# ---------------------------------------------------------------- a CPU of long ago

EMULATED = """
import dataclasses, json, os, resource, sys
from outlive._capture import blackbox, crash, stacks
from outlive._forensics import cpu
from outlive._system import memory
fd, stack_fd = memory.create(blackbox.SIZE), memory.create(stacks.SIZE)
mapped = memory.attach(fd)
box = blackbox.BlackBox(mapped)
pid = os.fork()
if pid == 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    box.begin(os.getpid())
    stacks.install(stack_fd)
    crash.install(mapped)
    exec(sys.argv[2])
    os._exit(0)
status = os.waitpid(pid, 0)[1]
with open(sys.argv[1], "wb") as file:
    file.write(mapped)
found = cpu.this_cpu()
told = {"name": found.name, "features": sorted(found.features), "known": sorted(found.known), "source": found.source}
print(json.dumps({"status": status, "cpu": told}))
"""


SUPERVISED = """
import json, resource, torch, outlive
class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        return torch.arange(64.0).exp() if index == 3 else torch.zeros(64)
policy = outlive.FaultPolicy(on_error="skip", retries=0, max_bad=None)
loader = outlive.DataLoader(Dataset(), batch_size=2, num_workers=1, multiprocessing_context="fork", faults=policy)
delivered = sum(len(batch) for batch in loader)
(incident,) = loader.incidents
verdict = incident.verdict
told = {"name": verdict.name, "confidence": verdict.confidence, "cause": verdict.cause, "remedies": verdict.remedies}
print(json.dumps({**told, "indices": incident.indices, "delivered": delivered}))
"""
needs_emulator = pytest.mark.skipif(
    not crash.AVAILABLE or shutil.which("qemu-x86_64") is None or not illegal_instructions.X86,
    reason="no recorder, no qemu-user, or not x86-64",
)


def emulate(model: str, *arguments: str, folder: Path, **environment: str) -> Any:
    """Run Python on such a CPU; what it printed."""
    search = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        ["qemu-x86_64", "-cpu", model, sys.executable, "-c", *arguments],
        env={**os.environ, **environment, "PYTHONPATH": search},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@needs_emulator
def test_numpy_is_named_when_it_is_too_new_for_the_cpu(tmp_path: Path) -> None:
    """A real wheel, on a CPU of 2006 without SSE4. NumPy is needed to search symbols: so that is done outside."""
    told = emulate("Conroe", EMULATED, str(tmp_path / "box"), "import numpy", folder=tmp_path)
    there = Cpu(told["cpu"]["name"], frozenset(told["cpu"]["features"]), frozenset(told["cpu"]["known"]), "CPUID")
    box = BlackBox((ctypes.c_ubyte * blackbox.SIZE).from_buffer_copy((tmp_path / "box").read_bytes()))
    record = crash.read(box)
    box.release()
    assert record is not None

    judged = autopsy.perform(incident_of(record, examine.examine(record, there)))

    assert os.waitstatus_to_exitcode(told["status"]) == -4
    assert told["cpu"]["source"] == "CPUID"
    assert "SSSE3" in there.features
    assert {"SSE4_1", "SSE4_2", "POPCNT", "AVX"} <= there.known - there.features
    verdict = judged.verdict
    assert verdict is not None
    assert (verdict.name, verdict.confidence) == (Name.CPU_FEATURE_MISSING, Confidence.CERTAIN), verdict
    assert "_multiarray_umath" in verdict.cause
    assert "needs SSE4_1" in verdict.cause
    assert "Conroe" in judged.evidence.examined.cpu
    assert "-Dcpu-baseline=none numpy" in verdict.remedies[0]


@pytest.mark.alone
@pytest.mark.timeout(400)  # 20 s on a machine of its own; an emulator feels every neighbour tenfold
@needs_emulator
def test_torch_is_named_when_a_worker_is_told_to_use_what_the_cpu_has_not_got(tmp_path: Path) -> None:
    """Trainer, zygote, workers and autopsy, all on a CPU of 2008: it has no AVX, and ATen is told that it has."""
    told = emulate("Nehalem", SUPERVISED, folder=tmp_path, ATEN_CPU_CAPABILITY="avx2")

    assert (told["name"], told["confidence"]) == ("cpu-feature-missing", "certain")
    assert "in libtorch_cpu.so needs AVX, which this CPU has not got" in told["cause"]
    assert "at::native::" in told["cause"]
    assert told["remedies"][0].startswith("ATEN_CPU_CAPABILITY=default")
    assert (told["indices"], told["delivered"]) == ([3], 5)
