#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks of different nodes make different calls. Every rank's error names both calls, soon after the later one. Each
rank is one process, which runs all cases with a new context for each.
usage: desync_test.py RANK_PROGRAM (FSDP_TEST_MANY: all cases in all places)"""
import os

import job as jobs
import tap
from job import Clean, Job, check_levels

FEW = ["AnotherGroup", "AnotherOrder", "AnotherMicrobatch", "TheLastReduceLeftOut", "TheLastReduceAndValues",
       "AnotherScale", "ValuesAndClose", "LoadOfAnotherDtype", "AnotherDtype", "AReduceAndSeal", "ValuesAndSealWithOneOther"]
# Cases that each replica of one rank goes through alone, so that the ranks do not differ.
ALONE = ["AReduceAndRead", "StepAndNorm", "NormAndParamNorms", "LoadOfAnotherRoot", "LoadOfAnotherDtype", "LoadAndRead",
         "ReadOfAnotherParameter", "SealAndRead"]
# With replicas of several ranks, those in the odd rank's replica see the difference in the norm already and do not come
# to the step.
CLIPS = ["AnotherMaxNorm", "ClipAndNorm"]
LIMIT_S = 10  # the library promises 2, but test machines delay threads; far below the timeout
TIMEOUT_S = 40

# name: ranks of nodes, options; the odd rank is on another node than most, or its node's only odd one
PLACES = {
    "a shard axis of 2 over 2 nodes": ([1, 1], {"odd": 1, "late": 0}),
    "2 replicas on 2 nodes": ([1, 1], {"replicate": 2, "shard": 1, "odd": 0, "late": 1}),
    "2x2 over 2 nodes, HSDP": ([2, 2], {"replicate": 2, "shard": 2, "odd": 3, "late": 0}),
    "2x2 over 2 nodes, HFSDP": ([2, 2], {"replicate": 2, "shard": 2, "outer": "hfsdp", "odd": 2, "late": 2}),
    "1x4 over 2 nodes": ([2, 2], {"odd": 2, "late": 1}),
}


def judge(ranks, number):
    """Returns the problems of the number-th case, and the time until the slowest rank had learnt of the difference."""
    told = [rank.result["cases"][number] for rank in ranks]
    name, later = told[0]["case"], max(case.get("called_at", 0) for case in told)
    problems = [f"{name}, rank {rank.number}: {case['problem']}: {case.get('text', '')}"
                for rank, case in zip(ranks, told) if "problem" in case]
    took = max((case.get("failed_at", 0) - later for case in told if not case.get("alone")), default=None)
    if took is None:
        return name, problems + [f"{name}: no call failed"], 0
    if took > jobs.allowed(LIMIT_S):
        problems.append(f"{name}: known after {took:.2f} s: {told[0].get('text')}")
    return name, problems, took


def answer(job, answered):
    """A rank that has failed in a case waits for a line: until all have told their error, or that the case is not theirs."""
    told = [{line["told"] for line in rank.lines if "told" in line} for rank in job.ranks]
    for rank, done in zip(job.ranks, answered):
        for name in {line["waits"] for line in rank.lines if "waits" in line} - done:
            if all(name in names for names in told):
                done.add(name)
                if rank.open:
                    os.write(rank.process.stdin.fileno(), b"\n")


def collect(job):
    answered = [set() for _ in job.ranks]
    job.until(lambda: answer(job, answered) or all(r.result or not r.open for r in job.ranks), 300, "the job")
    return job.collect(20)


def check(place):
    ranks_of_nodes, options = PLACES[place]
    leave_out = [] if "replicate" not in options else ALONE if max(ranks_of_nodes) == 1 else CLIPS
    options = dict(options, microbatches=1, timeout=TIMEOUT_S * 1000, cases="all" if tap.MANY else ",".join(FEW))
    with Clean(2) as network, Job(network, ranks_of_nodes, options) as job:
        ranks = collect(job)
        for rank in ranks:
            assert rank.result and "cases" in rank.result, str(rank)
        judged = [judge(ranks, n) for n in range(len(ranks[0].result["cases"]))
                  if ranks[0].result["cases"][n]["case"] not in leave_out]
    slowest = sorted(judged, key=lambda case: -case[2])[:3]
    tap.note(f"{place}: {len(judged)} cases, slowest: " + ", ".join(f"{name} {took:.2f} s" for name, _, took in slowest))
    problems = [problem for _, found, _ in judged for problem in found]
    assert not problems, "\n".join(problems)
    for rank in ranks:
        check_levels(rank.result)


tap.run([(place, lambda place=place: check(place)) for place in PLACES])
