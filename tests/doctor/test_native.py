"""Libraries that this machine, or another, cannot run: compiled for real, and what is said of them.

Reads   the installed packages, in the one test of a clean environment.
Writes  libraries and the doctor's memory, in temporary folders.
Never   the user's cache folder.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig

import pytest

from doctor.compiled_libraries import ASK, AT_LOAD, CAREFUL, FLOATS, WIDE, build, can_compile, run
from forensics.illegal_instructions import WANTING, missing_here
from outlive.doctor import native
from outlive.doctor.findings import Rank
from outlive.doctor.native import features, machines

pytest.importorskip("iced_x86", reason="instructions are read by iced-x86")
pytestmark = pytest.mark.skipif(not can_compile(), reason="needs x86-64 and a C compiler")

SUFFIX = f".{sysconfig.get_config_var('SOABI')}.so"
STOCK = ("torch ", "numpy ", "pandas ", "pyarrow ", "scipy ", "scikit-learn ")


@pytest.fixture(autouse=True)
def _memory_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def names(seen, about):
    return [finding.name for finding in seen.findings if about in finding.title]


def look(folder, *cpus):
    return native.survey(cpus, folders=[str(folder)])


# ---------------------------------------------------------------- instructions


@pytest.mark.parametrize("source", AT_LOAD.values(), ids=AT_LOAD)
def test_code_that_runs_at_load_will_kill_when_the_cpu_lacks_a_feature(tmp_path, source):
    """No way through a constructor or PyInit_ avoids it: the import is the end."""
    path = build(tmp_path, "victim.so", source)

    seen = look(tmp_path, "x86-64-v3", "x86-64-v4")

    (finding,) = [finding for finding in seen.findings if "x86-64-v3" in finding.title]
    assert finding.name == "cpu-feature-missing-at-import"
    assert finding.rank is Rank.WILL_KILL
    assert f"{path}: vaddps zmm0,zmm0,zmm0 at " in finding.facts[0]
    assert "AVX512F" in finding.title
    assert any("-march=x86-64-v3" in remedy for remedy in finding.remedies)
    assert names(seen, "x86-64-v4") == []


@pytest.mark.parametrize("source", CAREFUL.values(), ids=CAREFUL)
def test_nothing_is_found_when_code_is_chosen_by_cpu(tmp_path, source):
    """Dispatch, in all its forms, and bytes that are no instructions."""
    build(tmp_path, "victim.so", source)

    assert look(tmp_path, "x86-64", "x86-64-v3").findings == ()


def test_nothing_is_found_when_the_library_itself_is_for_some_cpus(tmp_path):
    """Who loads «_sums_avx512.so» has asked before."""
    build(tmp_path, "_sums_avx512.so", AT_LOAD["in a constructor"])

    assert names(look(tmp_path, "x86-64-v3"), "x86-64-v3") == []


def test_nothing_is_found_when_constants_share_a_segment_with_code(tmp_path):
    """As older linkers have it: they begin where the last function ends."""
    build(tmp_path, "victim.so", f"void last(void) {{}} {CAREFUL['bytes in data']}", "-Wl,-z,noseparate-code")

    assert look(tmp_path, "x86-64-v3").findings == ()


def test_what_the_database_may_have_left_out_is_missing_only_without_its_ground(tmp_path):
    """archspec lists AVX512_FP16 for no Intel CPU: a Zen 2 has no AVX-512, a Sapphire Rapids may have all of it."""
    build(tmp_path, "victim.so", f"__attribute__((constructor)) void start(void) {{ {run(WANTING['AVX512_FP16'])} }}")

    seen = look(tmp_path, "znver2", "sapphirerapids")

    assert names(seen, "znver2") == ["cpu-feature-missing-at-import"]
    assert names(seen, "sapphirerapids") == []


def test_code_may_kill_when_it_does_not_check_the_cpu(tmp_path):
    """A function that is called some day; the others are plain."""
    build(tmp_path, "victim.so", f"void plain(void) {{}} void work(void) {{ {run(WIDE)} }}")

    seen = look(tmp_path, "nehalem", "znver2")

    (finding,) = seen.findings
    assert finding.name == "cpu-feature-missing"
    assert finding.rank is Rank.MAY_KILL
    assert finding.title == "victim.so is compiled for CPUs with AVX; nehalem has not got that"
    assert "vaddps ymm0,ymm0,ymm0 at work+0x" in finding.facts[0]
    assert "nothing in the library asks the CPU first" in finding.facts[0]


def test_a_library_may_kill_when_all_of_it_is_compiled_so(tmp_path):
    """It asks the CPU for something else; but SSE is nowhere left in it."""
    asking = f"int has(void) {{ {ASK} return b; }}"
    build(tmp_path / "native", "victim.so", asking + FLOATS, "-mavx")
    chosen = "".join(f"void wide{n}(void) {{ {run(WIDE)} }}" for n in range(30))
    build(tmp_path / "careful", "other.so", asking + FLOATS + chosen)

    seen = look(tmp_path, "x86-64-v2")

    (finding,) = seen.findings
    assert finding.title == "victim.so is compiled for CPUs with AVX; x86-64-v2 has not got that"
    assert "all of the library is compiled so" in finding.facts[0]


def test_the_process_dies_as_foretold_when_this_cpu_lacks_the_feature(tmp_path):
    """The same library, looked at and then loaded."""
    missing = [name for name in missing_here() if features.is_judged(name)]
    if not missing:
        pytest.skip("this CPU has all that could be missing")
    path = build(
        tmp_path, "victim.so", f"__attribute__((constructor)) void start(void) {{ {run(WANTING[missing[0]])} }}"
    )

    (finding,) = look(tmp_path).findings
    ended = subprocess.run(
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(path)!r})"], stderr=subprocess.DEVNULL
    )

    assert finding.name == "cpu-feature-missing-at-import"
    assert missing[0] in finding.title
    assert "this CPU" in finding.title
    assert ended.returncode == -signal.SIGILL


def test_a_note_of_the_linker_is_obeyed_when_the_cpu_is_below_it(tmp_path):
    """ld.so refuses such a library before it runs anything."""
    build(tmp_path, "victim.so", "void work(void) {}", "-Wl,-z,x86-64-v4")

    seen = look(tmp_path, "x86-64-v2", "x86-64-v4")

    (finding,) = [finding for finding in seen.findings if "x86-64-v2" in finding.remedies[0]]
    assert (finding.name, finding.rank) == ("cpu-level-too-low", Rank.WILL_KILL)
    assert "victim.so is marked as needing x86-64-v4" in finding.title
    assert names(seen, "where x86-64-v4 is") == []


# ---------------------------------------------------------------- machines


def test_compilers_names_of_cpus_are_known():
    """znver2 is archspec's zen2; the levels need no database."""
    assert machines.named("znver2").features == machines.named("zen2").features
    assert machines.level_of(machines.named("znver2")) == "x86-64-v3"
    assert machines.level_of(machines.named("skylake_avx512")) == "x86-64-v4"
    assert machines.named("skylake-avx512").missing(["AVX512_VNNI", "AVX512F"]) == ("AVX512_VNNI",)
    assert machines.named("znver2").missing(["RDRAND", "SHA"]) == ()  # the database does not tell


@pytest.mark.parametrize(
    ("name", "words"), [("znver22", "did you mean znver2"), ("neoverse-n1", "is aarch64, not x86-64")]
)
def test_a_cpu_that_is_none_is_refused(name, words):
    with pytest.raises(machines.UnknownMachine, match=words):
        next(native.findings([name]))


def test_cpus_that_are_no_names_are_refused():
    """A string is a sequence, too, and None no name."""
    with pytest.raises(TypeError, match=r"got the string 'znver2'; use \['znver2'\]"):
        native.survey("znver2")
    with pytest.raises(TypeError, match=r"names such as 'x86-64-v2' or 'znver2', got 2"):
        native.survey([2])


def test_a_missing_extra_is_named(tmp_path):
    """Without archspec the levels work; without iced-x86 the rest does, and says so."""
    program = """
import sys
sys.modules["archspec"] = sys.modules["iced_x86"] = None
from outlive.doctor import native
from outlive.doctor.native import machines
print(native.survey(["x86-64-v2"], folders=[sys.argv[1]]).facts)
try:
    machines.named("znver2")
except machines.UnknownMachine as error:
    print(error)
"""
    said = subprocess.check_output([sys.executable, "-c", program, str(tmp_path)], text=True)

    assert "not looked at: the instructions of libraries; pip install 'outlive[forensics]'" in said
    assert "pip install 'outlive[doctor]' (without it: x86-64, x86-64-v2, x86-64-v3, x86-64-v4)" in said


# ---------------------------------------------------------------- what does not fit


def test_a_library_of_another_architecture_is_found_when_python_would_load_it(tmp_path):
    """Not one that nothing imports, nor one that is there for this machine, too."""
    module = "void *PyInit_victim(void) { return 0; }"
    for name, source in (("victim", module), ("tool", "void work(void) {}"), ("other/both", module), ("both", module)):
        build(tmp_path, f"{name}{SUFFIX}", source.replace("victim", name.rpartition("/")[2]))
    for name in ("victim", "tool", "both"):
        with open(tmp_path / f"{name}{SUFFIX}", "r+b") as file:
            file.seek(18)
            file.write(struct.pack("<H", 0xB7))

    (finding,) = look(tmp_path).findings

    assert (finding.name, finding.rank) == ("wrong-architecture", Rank.WILL_KILL)
    assert finding.title == f"victim{SUFFIX} is compiled for aarch64; this is x86_64, where it cannot be loaded"


def test_a_module_for_another_python_is_found_when_there_is_no_other_file(tmp_path):
    """A file in Python beside it serves."""
    build(tmp_path, "victim.cpython-39-x86_64-linux-gnu.so", "void *PyInit_victim(void) { return 0; }")
    build(tmp_path, "backed.cpython-39-x86_64-linux-gnu.so", "void *PyInit_backed(void) { return 0; }")
    (tmp_path / "backed.py").touch()

    (finding,) = look(tmp_path).findings

    assert (finding.name, finding.rank) == ("wrong-python", Rank.WILL_KILL)
    assert finding.title.startswith(
        "victim.cpython-39-x86_64-linux-gnu.so is compiled for cpython-39-x86_64-linux-gnu;"
    )
    ended = subprocess.run([sys.executable, "-c", "import victim"], cwd=tmp_path, capture_output=True, text=True)
    assert "ModuleNotFoundError: No module named 'victim'" in ended.stderr


def test_an_extension_for_another_torch_is_found_by_names_that_are_not_there(tmp_path):
    """One that wants what torch has is not; its std::string tells the flavour."""
    pytest.importorskip("torch", reason="an extension of it")
    check = "_ZN3c106detail14torchCheckFailEPKcS2_jRK"
    new = f"{check}NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
    for name, wanted in (("fits.so", new), ("old.so", f"{check}Ss")):
        build(tmp_path, name, f'void wanted(void) __asm__("{wanted}"); void work(void) {{ wanted(); }}')

    (finding,) = look(tmp_path).findings

    assert (finding.name, finding.rank) == ("torch-abi-mismatch", Rank.WILL_KILL)
    assert finding.title.startswith("old.so is compiled against another torch than the 2.")
    assert "c10::detail::torchCheckFail" in finding.facts[0]
    assert "_GLIBCXX_USE_CXX11_ABI=0" in finding.facts[1]


LOADING = """
import ctypes, json, sys, sysconfig
from outlive.doctor import native
held = [ctypes.CDLL(path) for path in sys.argv[1:]]
sys.path[:] = [sysconfig.get_path("stdlib")]
print(json.dumps([finding.to_dict() for finding in native.findings()]))
"""


@pytest.mark.parametrize(
    ("files", "title"),
    [
        (("libgomp-a34b3233.so.1", "libgomp-e985bcbb.so.1.0.0"), None),
        (("libgomp.so.1", "libiomp5.so"), "libgomp and libiomp5 are loaded in one process"),
        (("a/libomp.so", "b/libomp-7f3a.so.5"), "2 copies of libomp are loaded in one process"),
        (("a/libc++.so.1", "b/libc++-1f.so.1"), "2 copies of libc++ are loaded in one process"),
        (("libc++.so.1",), None),  # beside libstdc++, which is always there
    ],
)
def test_two_runtimes_are_found_when_they_harm_each_other(tmp_path, files, title):
    """Copies of libgomp do not: each wheel has its own."""
    paths = [str(build(tmp_path, name, f"int of_{number};")) for number, name in enumerate(files)]

    said = json.loads(subprocess.check_output([sys.executable, "-c", LOADING, *paths]))

    assert [finding["title"] for finding in said] == ([title] if title else [])
    for finding in said:
        assert finding["rank"] == "may kill"
        assert all(any(path in fact for fact in finding["facts"]) for path in paths)
        assert any(path in remedy for remedy in finding["remedies"] for path in paths)


# ---------------------------------------------------------------- files, memory, progress


def test_broken_files_cost_nothing_but_themselves(tmp_path):
    """Empty, cut, a text for the linker, 32 bits, or with any bytes in the headers."""
    whole = build(tmp_path / "whole", "victim.so", AT_LOAD["in a constructor"]).read_bytes()
    chance = random.Random(7)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "empty.so").touch()
    (broken / "text.so").write_text("INPUT(-lvictim)")
    (broken / "half.so").write_bytes(whole[: len(whole) // 2])
    (broken / "narrow.so").write_bytes(whole[:4] + b"\x01" + whole[5:])
    for number in range(300):
        content = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            content[chance.choice((chance.randrange(16, 1024), chance.randrange(16, len(whole))))] = chance.randrange(
                256
            )
        (broken / f"changed{number}.so").write_bytes(content)

    seen = look(tmp_path, "x86-64-v3")

    assert any("empty.so is no ELF file" in fact for fact in seen.facts)
    assert any("text.so is no ELF file" in fact for fact in seen.facts)
    assert any("narrow.so is 32-bit" in fact for fact in seen.facts)
    assert any(str(tmp_path / "whole") in fact for finding in seen.findings for fact in finding.facts)


def test_a_file_is_looked_at_once_and_again_when_it_changed(tmp_path, monkeypatch):
    """What was remembered is told; a memory that is broken is made anew."""
    memory = tmp_path / "cache" / "outlive" / "native-libraries.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "libraries"
    build(folder, "victim.so", AT_LOAD["in a constructor"])
    first = look(folder, "x86-64-v3")
    memory.write_text(memory.read_text().replace("start+0x", "remembered+0x"))

    again = look(folder, "x86-64-v3")
    build(folder, "victim.so", AT_LOAD["behind a call through the linker's table"])
    changed = look(folder, "x86-64-v3")
    memory.write_text('{"stamp": 3')
    anew = look(folder, "x86-64-v3")

    where = [seen.findings[0].facts[0].partition(" at ")[2].partition("+")[0] for seen in (first, again, changed, anew)]
    assert where == ["start", "remembered", "work", "work"]


def test_progress_goes_to_the_end(tmp_path):
    """Also where a library brings others with it."""
    build(tmp_path / "elsewhere", "libhelp.so", "void help(void) {}", "-Wl,-soname,libhelp.so")
    build(
        tmp_path / "here",
        "victim.so",
        "extern void help(void); void work(void) { help(); }",
        *(f"-L{tmp_path}/elsewhere", "-lhelp", "-Wl,-rpath,$ORIGIN/../elsewhere", "-Wl,--no-as-needed"),
    )
    steps: list[tuple[int, int]] = []

    seen = native.survey(progress=lambda done, total: steps.append((done, total)), folders=[str(tmp_path / "here")])

    assert steps == [(0, 1), (1, 2), (2, 2)]
    assert seen.facts[0].startswith("2 native libraries")


# ---------------------------------------------------------------- a clean environment


@pytest.mark.full  # test_loaders.py examines a clean loader of this installation
@pytest.mark.timeout(300)  # 12 s of a free core
def test_a_stock_installation_is_clean():
    """torch, NumPy, pandas, pyarrow, SciPy and scikit-learn, loaded together: nothing here, nor on older machines."""
    program = """
import importlib, json, sys
for name in ("torch", "numpy", "pandas", "pyarrow", "scipy.special", "sklearn"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
from outlive.doctor import native
seen = native.survey(["x86-64-v2", "nehalem", "znver2", "skylake-avx512"])
print(json.dumps([[finding.to_dict() for finding in seen.findings], seen.facts]))
"""
    findings, facts = json.loads(subprocess.check_output([sys.executable, "-c", program]))

    apart = {"cpu-feature-missing", "cpu-feature-missing-at-import", "cpu-level-too-low"}
    of_others = [f for f in findings if f["name"] in apart and not f["title"].startswith(STOCK)]
    assert [f["title"] for f in findings if f not in of_others] == []
    assert not [fact for fact in facts if "not looked at" in fact and "/torch/" in fact]


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="an older CPU is qemu-user's")
def test_an_older_cpu_dies_and_lives_as_foretold(tmp_path):
    """Emulated: a Nehalem has no AVX; one library runs it at load, one asks before."""
    programs = {}
    linking = ["-Wl,--no-as-needed", "-lvictim", "-Wl,-rpath,$ORIGIN"]
    for name, source in (("dies", AT_LOAD["in a constructor"]), ("lives", CAREFUL["a choice in a constructor"])):
        build(tmp_path / name, "libvictim.so", source)
        programs[name] = tmp_path / name / "program"
        subprocess.run(
            ["cc", "-x", "c", "-", "-o", programs[name], f"-L{tmp_path / name}", *linking],
            input="int main(void) { return 0; }",
            text=True,
            check=True,
        )

    ends = {
        name: subprocess.run(
            ["qemu-x86_64", "-cpu", "Nehalem", program], stderr=subprocess.DEVNULL, cwd=tmp_path
        ).returncode
        for name, program in programs.items()
    }

    assert ends == {"dies": -signal.SIGILL, "lives": 0}
    assert names(look(tmp_path / "dies", "nehalem"), "nehalem") == ["cpu-feature-missing-at-import"]
    assert names(look(tmp_path / "lives", "nehalem"), "nehalem") == []
    for left in tmp_path.glob("*.core"):
        os.unlink(left)
