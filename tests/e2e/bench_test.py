"""`gtrain bench` as a user types it: a table, a JSON document and a plot."""
import json
import os
import unittest
import xml.dom.minidom

import harness


class BenchTest(harness.GtrainTest):
    def test_allreduce_writes_a_table_a_document_and_a_plot(self):
        bench = self.start('bench', 'allreduce', '-n', '3', '--sizes', '8,4KiB', '--dtype', 'bfloat16', '--json',
                           'out/report.json', '--svg', 'plot.svg')
        self.assertEqual(bench.wait(), 0, bench.output())
        self.assertRegex(bench.output(), r'(?m)^# bytes us p95_us')
        report = json.loads(self.read('report.json'))
        self.assertEqual((report['bench'], report['ranks']), ('allreduce', 3))
        rows = report['tables'][0]['rows']
        self.assertEqual([row['bytes'] for row in rows], [8, 4096])
        for row in rows:
            self.assertGreater(row['us'], 0)
            self.assertGreaterEqual(row['p95_us'], row['us'])
            self.assertAlmostEqual(row['algbw_GB/s'], row['bytes'] / row['us'] / 1e3, delta=0.01 * row['bytes'] / row['us'] / 1e3 + 0.001)
        (curve,) = xml.dom.minidom.parse(os.path.join(self.dir, 'plot.svg')).getElementsByTagName('polyline')
        self.assertEqual(len(curve.getAttribute('points').split()), 2)
        self.end_local_cluster()

    def test_links_between_all_pairs_and_codecs(self):
        link = self.start('bench', 'link', '-n', '3', '--sizes', '8', '--json', 'out/link.json')
        self.assertEqual(link.wait(), 0, link.output())
        rows = json.loads(self.read('link.json'))['tables'][0]['rows']
        ends = [(row['from'].rsplit(':')[-1], row['to'].rsplit(':')[-1]) for row in rows]
        self.assertEqual(ends, [('0', '1'), ('0', '2'), ('1', '2')])
        codec = self.start('bench', 'codec', '--sizes', '100000', '--json', 'out/codec.json')
        self.assertEqual(codec.wait(), 0, codec.output())
        ratio = {row['codec']: row['ratio'] for row in json.loads(self.read('codec.json'))['tables'][0]['rows']}
        self.assertEqual(set(ratio), {'fp16', 'bf16', 'int8', 'fp8', 'topk', 'onebit'})
        self.assertAlmostEqual(ratio['fp16'], 2, delta=0.1)
        self.assertGreater(ratio['onebit'], 20)
        self.end_local_cluster()

    def test_what_makes_no_sense_is_said(self):
        for words, says in ((['bar'], 'no bench'), (['allreduce', '--sizes', '0'], 'not between'),
                            (['link', '--peers'], 'only allreduce has peers'),
                            (['allreduce', '--memory', 'rented'], 'allocate or private')):
            bench = self.start('bench', *words)
            self.assertEqual(bench.wait(), 2, bench.output())
            self.assertIn(says, bench.output())
        bench = self.start('bench', 'allreduce', '--dtype', 'float31')
        self.assertEqual(bench.wait(), 1, bench.output())
        self.assertIn('float31 is no dtype', bench.output())
        self.assertNotIn('generation 2', bench.output())
        self.end_local_cluster()


if __name__ == '__main__':
    unittest.main(verbosity=2)
