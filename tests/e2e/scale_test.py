"""Jobs that get more and fewer ranks while they run."""
import json
import os

import cluster
import harness
from harness import PlainShellTest, wait_until


class ScaleTest(PlainShellTest):
    def test_a_job_gets_less_and_more_ranks_while_it_runs(self):
        self.gtrain('launch', '-d', self.job_file('lm', f"""name: lm
run: {self.char_lm()} --steps 1000000
ranks: {{min: 1, max: 3}}
checkpoint: {{uri: ./ckpt, every: 10 steps}}
"""))
        size = lambda: (job := self.job('lm') or {}).get('state') == 'RUNNING' and job['world_size']
        cpus = min(3, len(os.sched_getaffinity(0)))
        wait_until('as many as there are CPUs', lambda: size() == cpus)
        answer = json.loads(self.gtrain('scale', 'lm', '-n', '3', '--json').stdout)
        self.assertEqual((answer['size'], answer['wanted'], answer['room']), (cpus, 3, 3))
        wait_until('all three', lambda: size() == 3)
        self.assertIn('lm-1: 1 rank behind its next checkpoint; it has 3', self.gtrain('scale', 'lm', '-n', '1').stdout)
        wait_until('one rank', lambda: size() == 1)
        self.assertRegex(self.gtrain('why', 'lm').stdout, r'it shrinks from 3 to 1 rank, from the checkpoint of step [1-9]\d*')
        self.gtrain('scale', 'lm', '-n', '2', '--now')
        wait_until('two ranks', lambda: size() == 2)
        self.assertEqual(self.job('lm')['restarts'], 0, 'nobody is charged')
        refused = self.gtrain('scale', 'lm', '-n', '4', expect=2)
        self.assertIn('the job file of lm-1 allows 1 to 3 ranks, not 4', refused.stderr)
        self.gtrain('scale', 'lm', expect=2)
        self.gtrain('stop', 'lm', '--now')
        self.wait_for_state('lm', 'CANCELLED')
        self.assertIn('is over', self.gtrain('scale', 'lm-1', '-n', '2', expect=1).stderr)

    def test_a_size_that_does_not_work_is_given_up(self):
        """By a program that never reports a step, nor a checkpoint."""
        self.gtrain('launch', '-d', self.job_file('picky', """name: picky
run: ['sh', '-c', '[ "$WORLD_SIZE" -le 2 ] || exit 1; exec sleep 1000']
ranks: {min: 1, max: 6000}
resources: {cpus: 1}
restart: {budget: 0}
"""))
        size = lambda: (job := self.job('picky') or {}).get('state') == 'RUNNING' and job['world_size']
        wait_until('it runs', size)
        self.gtrain('scale', 'picky', '-n', '2', '--now')
        wait_until('two ranks', lambda: size() == 2)
        refused = self.gtrain('scale', 'picky', '-n', '5000', '--now', expect=2)
        self.assertRegex(refused.stderr, r'5000 ranks are more than \S+ can hold, which is \d+: ')
        self.gtrain('scale', 'picky', '-n', '3', '--now')
        wait_until('it is given up', lambda: 'it goes back to 2 ranks: rank' in self.gtrain('why', 'picky').stdout)
        wait_until('two ranks again', lambda: size() == 2)
        self.assertEqual(self.job('picky')['restarts'], 0)
        answer = self.gtrain('scale', 'picky', '-n', '1').stdout
        self.assertIn('picky-1: 1 rank behind its next checkpoint; it has 2; it has committed no checkpoint so far', answer)
        self.assertIn('wants 1 rank behind its next checkpoint', self.gtrain('why', 'picky').stdout)
        for i in range(6):
            self.gtrain('scale', 'picky', '-n', str(1 + i % 2), '--now')
            wait_until('another size', lambda: size() == 1 + i % 2)
        self.assertNotIn('again in', self.gtrain('why', 'picky').stdout)
        self.gtrain('stop', 'picky', '--now')
        self.wait_for_state('picky', 'CANCELLED')


class NewcomerTest(cluster.ClusterTest):
    agent_count = 0

    def test_a_machine_that_cannot_start_the_program_costs_only_the_growth(self):
        programs = os.path.join(self.dir, 'programs')
        os.mkdir(programs, 0o755)
        program = os.path.join(programs, 'mytrain')
        with open(program, 'w') as out:
            out.write('#!/bin/sh\nwhile sleep 1; do s=$((s + 1)); echo "{\\"step\\": $s, \\"checkpoint\\": true}"'
                      ' >> $GTRAIN_REPORT; done\n')
        os.chmod(program, 0o755)
        path = os.environ['PATH']
        os.makedirs(self.node_home(0)), os.makedirs(self.node_home(1))
        self.start_agent(0, GTRAIN_JOIN_TOKEN=self.token(), PATH=f'{programs}:{path}')
        wait_until('one node', lambda: self.nodes_in('alive') == 1)
        job = self.submit(self.job_file('grow', 'name: grow\nrun: [mytrain]\nnodes: {min: 1, max: 2}\nranks_per_node: 1\n'))
        size = lambda: (job := self.job('grow') or {}).get('state') == 'RUNNING' and job['world_size']
        wait_until('one rank', lambda: size() == 1)
        self.start_agent(1, GTRAIN_JOIN_TOKEN=self.token(), PATH=path)
        why = lambda: self.client('why', job).stdout
        wait_until('it is given up', lambda: 'it goes back to 1 rank: rank 1 on node1: could not be started' in why(), 120)
        self.assertIn('it grows from 1 to 2 ranks, from the checkpoint of step', why())
        wait_until('one rank again', lambda: size() == 1)
        now = self.job('grow')
        self.assertEqual((now['restarts'], [node['hostname'] for node in now['avoided']]), (0, ['node1']), why())
        self.client('stop', job, '--now')
        wait_until('its end', lambda: self.job('grow')['state'] == 'CANCELLED')


if __name__ == '__main__':
    harness.main()
