#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures with fsdp-perf and tests/benchmark/fsdp2.sh, and writes the tables of docs/performance.md.

  tools/dev/measure.py [--perf build/tools/fsdp-perf] [--only NAMES] [--runs 5] [--write docs]

The table "hosts" needs root, for network namespaces; for others it is left out. The tables "tokens" and "sharding"
compare train_gpt with PyTorch and DeepSpeed. PYTHON names a Python that has both (python3). Without PyTorch these
tables are left out; without DeepSpeed it has no figures in them.

Each table belongs to one kind of machine (AVX-512, AVX2 or other), by the kernels that fsdp-perf reports. Without
--write the tables are printed. With --write, a table replaces the one between "<!-- measured: NAME KIND -->" and
"<!-- end -->", or is added after the last table of its name. The tables of other kinds stay as they are.
Run nothing else on the machine."""
import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

KIB, MIB = 1 << 10, 1 << 20
EXIT_SKIPPED = 77
SHARDED = {'libfsdp': 'libfsdp', 'fsdp2': 'FSDP2', 'zero3': 'ZeRO-3'}
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def size_text(size):
    return f'{size // MIB} MiB' if size >= MIB else f'{size // KIB} KiB' if size >= KIB else f'{size} B'


def spread(values, form='{:.2f}'):
    """The least, the median and the greatest value; one value where all look the same."""
    ordered = sorted(values)
    texts = [form.format(value) for value in (ordered[0], statistics.median(ordered), ordered[-1])]
    return texts[1] if len(set(texts)) == 1 else ' / '.join(texts)


class Results:
    """The lines of several runs of one command."""

    def __init__(self, runs):
        self.runs = runs

    def values(self, key, **wanted):
        found = [line[key] for run in self.runs for line in run if all(line[k] == v for k, v in wanted.items())]
        return [value for value in found if value is not None]

    def cell(self, key, form='{:.2f}', **wanted):
        values = self.values(key, **wanted)
        return spread(values, form) if values else '-'

    def sizes(self, operation):
        return sorted({line['bytes'] for run in self.runs for line in run if line['op'] == operation})

    def by_size(self, head, operation, rows):
        """Rows of (title, key, further conditions), with a column for each size."""
        sizes = self.sizes(operation)
        table = [[head] + [size_text(size) for size in sizes]]
        for title, key, wanted in rows:
            table.append([title] + [self.cell(key, op=operation, bytes=size, **wanted) for size in sizes])
        return table


def exposed(results):
    table = [['2 ranks', 'exposed communication, %', 'step, ms', 'communication alone, ms']]
    for variant in ('copied', 'mapped'):
        wanted = {'op': 'step', 'variant': variant}
        scale = lambda key: spread([value / 1000 for value in results.values(key, **wanted)], '{:.1f}')
        table.append([variant, results.cell('exposed_percent', '{:.1f}', **wanted), scale('time_us'),
                      scale('communication_us')])
    return table


def reduces(results):
    table = [['2 ranks, time of a reduce, us'] + [size_text(size) for size in results.sizes('reduce')]]
    for variant, title in (('back to back', 'one after the other'),
                           ('after computing', 'after 100 us of computing (not counted)')):
        table.append([title] + [results.cell('reduce_us', op='reduce', variant=variant, bytes=size)
                                for size in results.sizes('reduce')])
    return table


def short(results):
    head = '2 ranks, x ref'
    return (results.by_size(head, 'unshard', [('copied unshard', 'ratio', {'variant': 'copied'})]) +
            results.by_size(head, 'all_reduce', [('all_reduce fp32', 'ratio', {'dtype': 'fp32'})])[1:])


def collectives(results):
    rows = [('all_gather', 'in place', 'bytes', 'all_gather in place'),
            ('all_gather', 'out of place', 'bytes', 'all_gather elsewhere'),
            ('reduce_scatter', 'other buffer', 'fp32', 'reduce_scatter fp32'),
            ('reduce_scatter', 'own buffer', 'fp32', '... into its own buffer'),
            ('reduce_scatter', 'other buffer', 'bf16', 'reduce_scatter bf16 into fp32'),
            ('all_reduce', '', 'fp32', 'all_reduce fp32')]
    sizes = results.sizes('all_gather')
    table = [['2 ranks: x ref; x MPI'] + [size_text(size) for size in sizes]]
    for operation, variant, dtype, title in rows:
        wanted = {'op': operation, 'variant': variant, 'dtype': dtype}
        cells = [(results.cell('ratio', bytes=size, **wanted),
                  results.cell('peer_ratio', '{:.1f}', bytes=size, **wanted)) for size in sizes]
        table.append([title] + [ratio if peer == '-' else f'{ratio}; {peer}' for ratio, peer in cells])
    return table


def quantize(results):
    return results.by_size('2 ranks, x ref', 'quantize', [
        ('MXFP8, both planes', 'ratio', {'dtype': 'both planes'}),
        ('MXFP8, rounded to bf16 first', 'ratio', {'dtype': 'both, via bf16'}),
        ('FP8, amax and codes', 'ratio', {'variant': 'fp8'}), ('FP8 blocks', 'ratio', {'variant': 'fp8_block'})])


def adamw(results):
    """Compares kernels with a copy; the last row is the time of each additional small tensor."""
    kernels = [line for line in results.runs[0] if line['op'] == 'adamw' and line['variant'] == 'kernel']
    sizes = sorted({line['bytes'] for line in kernels})
    table = [['2 ranks, x ref'] + [size_text(size) for size in sizes]]
    for dtype in dict.fromkeys(line['dtype'] for line in kernels):
        wanted = {'op': 'adamw', 'variant': 'kernel', 'dtype': dtype}
        table.append([dtype] + [results.cell('ratio', bytes=size, **wanted) for size in sizes])
    small = results.cell('ns_per_tensor', '{:.0f}', op='adamw', variant='10,000 small tensors')
    return table + [['each of 10,000 tensors of 64 elements', f'{small} ns more'] + [''] * (len(sizes) - 1)]


def hosts(results):
    """Sums between two hosts, and the raw socket within the same run."""
    sizes = results.sizes('outer')
    table = [['2 hosts, x ref; us'] + [size_text(size) for size in sizes]]
    for variant in dict.fromkeys(line['variant'] for line in results.runs[0]):
        wanted = {'op': 'outer', 'variant': variant}
        cells = [(results.cell('ratio', bytes=size, **wanted),
                  results.cell('time_us', '{:.0f}', bytes=size, **wanted)) for size in sizes]
        table.append([variant] + [f'{ratio}; {time}' for ratio, time in cells])
    return table


def tokens(results):
    lines = results.runs[0]
    table = [[lines[0]['model'], 'tokens/s', 'train_gpt, times as fast']]
    for title in [line['title'] for line in lines]:
        table.append([title, results.cell('tokens_per_s', '{:.0f}', title=title), results.cell('ratio', title=title)])
    return table


def sharding(results):
    table = [['2 ranks of one thread', *SHARDED.values()]]
    for model in dict.fromkeys(line['model'] for line in results.runs[0]):
        for title, key, form in (('step, ms', 'step_ms', '{:.1f}'), ('compute alone, ms', 'compute_ms', '{:.1f}'),
                                 ('AdamW alone, halved, ms', 'optimizer_half_ms', '{:.2f}'),
                                 ('step - compute, ms', 'beyond_compute_ms', '{:.1f}'),
                                 ("libfsdp's, divided by it", 'ratio', '{:.3f}'),
                                 ('peak resident of a rank, MiB', 'peak_rss_mib', '{:.0f}'),
                                 ('both ranks, proportional, MiB', 'sum_pss_mib', '{:.0f}')):
            table.append([f'{model}: {title}'] + [results.cell(key, form, model=model, kind=kind) for kind in SHARDED])
    return table


def run(command, allowed=(0,), output=subprocess.DEVNULL):
    status = subprocess.run(command, stdout=output).returncode
    if status not in allowed:
        sys.exit(f'measure.py: {" ".join(command)}: status {status}')
    return status


def run_perf(options, arguments, command=()):
    """The lines of a run of fsdp-perf, which `command` starts."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'lines.jsonl')
        run([*(command or (options.perf, '-n', '2')), '--json', path] + arguments)
        with open(path) as lines:
            return [json.loads(line) for line in lines]


def run_hosts(options, arguments):
    """The lines of a run between two network namespaces, or none if this user may not make any."""
    if os.geteuid() != 0:
        print('measure.py: only root may make network namespaces', file=sys.stderr)
        return []
    return run_perf(options, arguments, ('sh', options.namespaces, options.perf, '0'))


def compare(options, arguments):
    """The result of a round of fsdp2.sh, or None if that was skipped."""
    build = os.path.dirname(os.path.dirname(os.path.abspath(options.perf)))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'result.json')
        command = ['sh', options.trainings, build, '--rounds', '1', '--json', path] + arguments
        if run(command, (0, EXIT_SKIPPED), sys.stderr) == EXIT_SKIPPED:
            return None
        with open(path) as file:
            result = json.load(file)
    return result | {'machine': run_perf(options, ['--op', 'barrier', '--pairs', '3'])[0]['machine'],
                     'millions': f'{1e-6 * result["parameters"]:.2f} M parameters'}


def run_trainings(options, arguments):
    """A line for each training, or none if they were skipped."""
    result = compare(options, arguments)
    return [{'machine': result['machine'], 'model': f'GPT of {result["millions"]}', 'title': one['title'],
             **{key: statistics.median(one[key]) if one[key] else None for key in ('tokens_per_s', 'ratio')}}
            for one in result['trainings']] if result else []


def run_shardings(options, models):
    """A line for each model and each program that shards it, or none if they were skipped."""
    lines = []
    for arguments in models:
        result = compare(options, arguments)
        if not result:
            return []
        for kind in [kind for kind in SHARDED if kind in result]:
            times, ours = result[kind]['median'], result['libfsdp']['median']
            ratio = ours['beyond_compute_s'] / times['beyond_compute_s']
            lines.append({'machine': result['machine'], 'model': result['millions'], 'kind': kind,
                          'ratio': None if kind == 'libfsdp' else ratio, **result[kind]['memory'],
                          **{re.sub('_s$', '_ms', key): 1000 * value for key, value in times.items()}})
    return lines


SMALL_MODEL = '--layers 4 --width 128 --heads 4 --context 64 --batch 4 --steps 60'.split()

# name: (function that makes a run, its arguments, multiplier of --runs, function that makes the table)
TABLES = {
    'exposed': (run_perf, ['-c', '--op', 'step'], 2, exposed),
    'reduce': (run_perf, ['-c', '--op', 'reduce', '-b', '4K', '-e', '1M'], 1, reduces),
    'short': (run_perf, ['-c', '--op', 'unshard,all_reduce', '-b', '16K', '-e', '4M'], 1, short),
    'collectives': (run_perf, ['-c', '--mpi', '--op', 'all_gather,reduce_scatter,all_reduce', '-b', '64K', '-f', '16'],
                    1, collectives),
    'quantize': (run_perf, ['-c', '--op', 'quantize', '-b', '16M', '-e', '64M'], 1, quantize),
    'adamw': (run_perf, ['-c', '--op', 'adamw', '-b', '16M', '-f', '16', '-p', '9'], 1, adamw),
    'hosts': (run_hosts, ['-c', '-b', '64', '-e', '64K', '-f', '8', '-p', '101'], 1, hosts),
    'tokens': (run_trainings, ['--tokens'], 1, tokens),
    'sharding': (run_shardings, [SMALL_MODEL, []], 1, sharding),
}


def kind_of(machine):
    return 'AVX-512' if 'kernels AVX3' in machine else 'AVX2' if 'kernels AVX2' in machine else 'other'


def commit():
    """The commit of the source tree, with "-dirty" if tracked files outside of docs/ have changed."""
    def ask(*words):
        return subprocess.run(('git',) + words, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    changed = ask('status', '--porcelain', '--untracked-files=no', '--', '.', ':!docs')
    return (ask('rev-parse', '--short', 'HEAD') or 'unknown') + ('-dirty' if changed else '')


def table_text(table):
    rows = ['| ' + ' | '.join(row) + ' |' for row in table]
    return '\n'.join([rows[0], '|' + '---|' * len(table[0])] + rows[1:])


def block_text(name, kind, machine, version, count, table):
    today = datetime.date.today()
    note = (f'{kind}: {machine}. {today.day} {today:%B %Y}, commit {version}, {count} runs: '
            'minimum / median / maximum, or one value if they are equal.')
    return f'<!-- measured: {name} {kind} -->\n{wrap(note)}\n\n{table_text(table)}\n<!-- end -->'


def wrap(text, width=120):
    lines = ['']
    for word in text.split():
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append('')
        lines[-1] += (' ' if lines[-1] else '') + word
    return '\n'.join(lines)


def put(document, name, kind, block):
    """The document with the block in place of the old one of this name and kind, or after the last one of the name."""
    def blocks(of_kind):
        return list(re.finditer(rf'<!-- measured: {re.escape(name)} {of_kind} -->.*?<!-- end -->', document, re.S))
    old, others = blocks(re.escape(kind)), blocks('[^ ]+')
    if old:
        return document[:old[0].start()] + block + document[old[0].end():]
    if not others:
        sys.exit(f'measure.py: the document has no marker "<!-- measured: {name} ... -->"')
    return document[:others[-1].end()] + '\n\n' + block + document[others[-1].end():]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--perf', default='build/tools/fsdp-perf',
                        help='path of fsdp-perf, from a release build without tests')
    parser.add_argument('--trainings', default=os.path.join(ROOT, 'tests/benchmark/fsdp2.sh'),
                        help='path of the script that compares trainings')
    parser.add_argument('--namespaces', default=os.path.join(ROOT, 'tools/dev/outer_namespaces.sh'),
                        help='path of the script that starts fsdp-perf in two network namespaces')
    parser.add_argument('--only', default=','.join(TABLES),
                        help='names of tables, separated by commas: ' + ', '.join(TABLES))
    parser.add_argument('--runs', type=int, default=5, help='runs for each table (5); twice as many for "exposed"')
    parser.add_argument('--write', metavar='DOCS', help='the folder of performance.md')
    options = parser.parse_args()
    names = options.only.split(',')
    if unknown := [name for name in names if name not in TABLES]:
        parser.error(f'no table {unknown[0]!r} (known: {", ".join(TABLES)})')
    version = commit()
    for name in names:
        take, arguments, factor, make = TABLES[name]
        count = options.runs * factor
        runs = []
        for number in range(count):
            print(f'{name}: run {number + 1} of {count}', file=sys.stderr)
            runs.append(take(options, arguments))
            if not runs[0]:
                break
        if not runs[0]:
            print(f'measure.py: table {name!r} is left out, for the reason above', file=sys.stderr)
            continue
        machine = runs[0][0]['machine']
        kind = kind_of(machine)
        block = block_text(name, kind, machine, version, count, make(Results(runs)))
        if not options.write:
            print(block + '\n')
            continue
        path = os.path.join(options.write, 'performance.md')
        with open(path) as file:
            document = file.read()
        with open(path, 'w') as file:
            file.write(put(document, name, kind, block))


if __name__ == '__main__':
    main()
