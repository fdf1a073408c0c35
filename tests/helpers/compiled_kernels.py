"""Every kernel, compiled ahead of time for GPUs that are not here: nothing spills, memory is moved in whole words.

By default every kernel is compiled for one target; `--full` adds more cases, and a part of them for the other targets.
`test_kernels_compile.py` runs this file in a process of its own. What a kernel takes is compared with
`kernel_resources.json`, which has a table for each of two versions of Triton: see `kernel_cases.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from kernel_cases import CASES, FRAMES, MAIN_TARGET, WHOLE_WORDS, cases, chosen, compiled, measured, read_table
from launches import TARGETS, Launch, compile_for, every_kernel

from gpu_replay.ops.windows import frame_tile

# whose frames are moved whole, and those of them that other tests compile as well
WHOLE_FRAMES = ("atari", "atari to half", "sequences", "strict sequences")
SOME_FRAMES = ("atari", "strict sequences")
# what may change without a look at why
REGISTERS_MORE = 1.25
SHARED_MORE = 2048
# of 255 that a thread can have: with 128 threads a block, four blocks fit
MOST_REGISTERS = 128
MOST_SHARED = 16384
# bytes of one kernel that triton 3.4 spills; those that have a table spill nothing
SPILLED_ELSEWHERE = 16


targets = pytest.mark.parametrize(
    "target", [pytest.param(each, marks=[] if each == MAIN_TARGET else pytest.mark.slow) for each in TARGETS]
)


def text_of(case: str, target: str) -> str:
    """The PTX or AMD assembly of a case."""
    return str(compiled(case, target).asm["amdgcn" if target.startswith("gfx") else "ptx"])


@targets
def test_nothing_spills_and_no_kernel_takes_much_more_than_it_did(target: str, full: bool) -> None:
    found = {case: measured(case, target) for case in chosen(target, full)}
    assert len(found) >= 15
    wrong = {}
    # a compiler without a table is held to the bounds alone
    table = read_table()
    for case, now in found.items():
        spills = now.spilled > (0 if table else SPILLED_ELSEWHERE)
        if spills or now.registers > MOST_REGISTERS or now.shared > MOST_SHARED:
            wrong[case] = f"{now} is too much"
        elif table:
            before = table[target][case]
            if now.registers > before.registers * REGISTERS_MORE or now.shared > before.shared + SHARED_MORE:
                wrong[case] = f"{before} became {now}"
    assert wrong == {}, "if that is meant: PYTHONPATH=. python tests/helpers/kernel_cases.py"


# a count of samples and a position in a batch have 32 bits; a sum or an extreme of masses must have 64
COUNTS = {"add.u32", "max.s32", "min.s32"}
SUMS = {"add.u64", "max.s64"}


def atomics_of(ptx: str) -> list[tuple[str, str, str]]:
    """Scope, order and operation of every atomic of a kernel: ("gpu", "relaxed", "add.u64")."""
    found = re.findall(r"\b(?:red|atom)\.(\S+)", ptx)
    parts = [re.fullmatch(r"global\.(\w+)\.(\w+)\.(\w+\.\w+)", each) for each in found]
    assert None not in parts, found
    return [(each[1], each[2], each[3]) for each in parts if each]


# kernels whose last program does something for all; a gather does where it finishes a sample
TICKETED = ("add_kernel", "add_step_kernel")


def takes_tickets(launch: Launch) -> bool:
    """Whether the programs of a launch count themselves."""
    if launch.name in ("gather_kernel", "gather_windows_kernel"):
        return bool(launch.constants["DRAWS"] > 0)
    return launch.name in TICKETED


def test_every_atomic_is_of_integers_and_relaxed_but_for_the_ticket(full: bool) -> None:
    """The program that takes the last ticket changes what the others have read, and reads what they have added up: the
    ticket alone puts that in order, so it releases what came before it and acquires what the others released.

    All else are sums, largest masses and counts, which come out the same in any order and are read by a later launch.
    """
    wrong, tickets, kinds = {}, 0, set()
    # what other tests compile as well, and what they leave out
    some = list(cases(True)) if full else chosen(MAIN_TARGET, False)
    for case in some:
        atomics = atomics_of(text_of(case, MAIN_TARGET))
        wanted = takes_tickets(cases(full)[case])
        ordered = [kind for _, order, kind in atomics if order != "relaxed"]
        relaxed = {kind for _, order, kind in atomics if order == "relaxed"}
        kinds |= relaxed
        tickets += wanted
        if ordered != ["add.u64"] * wanted or relaxed - COUNTS - SUMS or {scope for scope, *_ in atomics} - {"gpu"}:
            wrong[case] = atomics
    assert wrong == {}
    # the test saw all kinds of them, in all kernels that have any
    assert tickets >= 8
    ticketed = {launch.name for launch in cases(False).values() if takes_tickets(launch)}
    assert len(ticketed) == 4
    assert ticketed <= {cases(full)[case].name for case in some}
    assert kinds == COUNTS | SUMS


def test_whole_words_are_moved_as_such(full: bool) -> None:
    looked_at = 0
    for name in WHOLE_WORDS if full else ("frames", "brain floats"):
        for kernel, call in (("add_kernel", "add"), ("gather_kernel", "sample")):
            # fields that differ in nothing but their scale are written by the same code
            case = f"{kernel}: {name}, latest: {call}"
            if case in cases(False):
                launch = cases(False)[case]
                # without the end of a sample, which has other numbers
                constants = launch.constants | ({"DRAWS": 0} if call == "sample" else {})
                ptx = compile_for(replace(launch, constants=constants), MAIN_TARGET).asm["ptx"]
                kinds = [re.findall(rf"{way}\.global\.(\S+)", ptx) for way in ("ld", "st")]
                loads, stores = ([kind for kind in each if kind in ("v4.b32", "v2.b64")] for each in kinds)
                assert loads, case
                # beside the values: counters and slots, 8 bytes each; an add stores keys and counts
                assert set(kinds[0]) <= {*loads, "b64"}, case
                assert set(kinds[1]) <= {*stores, *(("b64", "b32") if call == "add" else ())}, case
                # what is added is not converted
                assert len(stores) == len(loads) if call == "add" else stores, case
                looked_at += 1
    assert looked_at >= (10 if full else 4)


def test_frames_of_stacks_are_moved_in_whole_words(full: bool) -> None:
    for name in {*FRAMES, *WHOLE_FRAMES} if full else SOME_FRAMES:
        field, settings = CASES[name][1]["obs"], CASES[name][3]
        tile = frame_tile(field, 1000, False)
        # of floats a frame is too long to be moved whole
        assert (tile.chunks == 1) == (name in WHOLE_FRAMES), name
        # a frame may come from the ring or be a kept final observation
        places = 2 if settings.get("autoreset") == "same_step" else 1
        case = f"gather_windows_kernel: {name}: starts"
        ptx = text_of(case, MAIN_TARGET)
        # each thread moves 16 bytes at once
        words = tile.rows * tile.columns // (32 * cases(False)[case].constants["num_warps"] * 16)
        loads, stores = words * field.dtype.itemsize, words * field.output_dtype.itemsize
        wide = {kind: len(re.findall(rf"{kind}\.global\.(?:v4\.b32|v2\.b64)", ptx)) for kind in ("ld", "st")}
        assert wide["st"] == stores, case
        assert wide["ld"] == loads * places, case


def test_a_sum_of_rewards_is_rounded_as_on_the_host(full: bool) -> None:
    for name in FRAMES if full else SOME_FRAMES[:1]:
        launch = cases(False)[f"gather_windows_kernel: {name}: starts"]
        # powers of weights, which are only close, are made of such
        constants = launch.constants | {"DRAWS": 0}
        ptx = compile_for(replace(launch, constants=constants), MAIN_TARGET).asm["ptx"]
        assert "st.global" in ptx
        assert "fma" not in ptx, name


@pytest.mark.parametrize("kernel", ["draw_kernel", "choose_goals_kernel"])
def test_a_draw_is_rounded_once(kernel: str, full: bool) -> None:
    """A multiplication fused with an addition, or a short division, would draw other keys than the CPU."""
    chosen_cases = [case for case in chosen(MAIN_TARGET, full) if case.startswith(kernel)]
    assert chosen_cases
    for case in chosen_cases:
        ptx = text_of(case, MAIN_TARGET)
        assert "fma" not in ptx, case
        assert set(re.findall(r"(?:div|sqrt)\.\w+\.f64", ptx)) <= {"div.rn.f64", "sqrt.rn.f64"}, case


def test_every_kernel_is_compiled_here() -> None:
    assert {launch.name for launch in cases(False).values()} == every_kernel()
