"""What `make bench-gate` lets pass."""
import json
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import bench_gate  # noqa: E402


def row(ratio, *turns):
    return {'ratio': ratio, 'spread': bench_gate.spread(turns)}


class BenchGateTest(unittest.TestCase):
    def word(self, old, new):
        return bench_gate.verdict(old, new)[0]

    def test_a_slowdown_fails_however_the_turns_scatter(self):
        old = row(1.0, 0.99, 0.99, 1.0, 1.01, 1.02)
        self.assertEqual(self.word(old, row(1.05, 1.0, 1.04, 1.05, 1.06, 1.1)), 'ok')
        self.assertEqual(self.word(old, row(1.2, 1.2, 1.2, 1.2, 1.2, 1.2)), 'WORSE')
        self.assertEqual(self.word(old, row(2.0, 2.0, 2.0, 2.0, 2.0, 8.0)), 'WORSE', 'an outlier buys nothing')
        self.assertEqual(self.word(old, row(1.05, 0.5, 0.7, 1.05, 1.6, 3.0)), 'noisy')

    def test_a_record_allows_a_half_at_most(self):
        old = row(6.0, 1.0, 4.0, 6.0, 8.0, 20.0)
        self.assertEqual(self.word(old, row(8.9, 8.9, 8.9, 8.9, 8.9, 8.9)), 'ok')
        self.assertEqual(self.word(old, row(9.1, 9.1, 9.1, 9.1, 9.1, 9.1)), 'WORSE')

    def test_a_record_that_scatters_more_than_that_gates_nothing(self):
        old = row(6.0, 1.0, 2.0, 6.0, 12.0, 20.0)
        self.assertEqual(self.word(old, row(30.0, 30.0, 30.0, 30.0, 30.0, 30.0)), 'loose')

    def test_the_recorded_ratios_pass_against_themselves(self):
        with open(bench_gate.BASELINE, encoding='utf-8') as data:
            recorded = json.load(data)['benches']
        self.assertEqual(bench_gate.compare(recorded, recorded), [])
        words = [self.word(row, row) for rows in recorded.values() for row in rows.values()]
        self.assertGreater(words.count('ok'), 2 * words.count('loose'), 'most rows gate something')

    def test_rows_of_one_side_fail(self):
        one = {'launch': {'a': row(1.0, 1, 1, 1, 1, 1)}}
        both = {'launch': {**one['launch'], 'b': row(1.0, 1, 1, 1, 1, 1)}}
        self.assertEqual(bench_gate.compare(both, one), ['launch: b: gone'])
        self.assertEqual(bench_gate.compare(one, both), ['launch: b: new'])
        self.assertEqual(bench_gate.compare(one, one), [])


if __name__ == '__main__':
    unittest.main()
