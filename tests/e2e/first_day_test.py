"""What a stranger meets on the first day, typed as a user would: in a terminal of 100 x 30 and through pipes, without root.
One class for each habit; their order is that of a day."""
import os
import signal

import harness


class FirstDayTest(harness.GtrainTest):
    ordinary_user = True


# ---- live output
# ---- exec and interactive programs
# ---- stalls and stacks
# ---- a second launch of the same job
# ---- nothing vanishes
# ---- times and owners
# ---- a head that restarts or moves
# ---- secrets
# ---- attach
class AttachTest(FirstDayTest):
    def test_ctrl_c_detaches(self):
        """As in tmux and docker: who looks at a job of the own machine does not end it by looking away."""
        done = os.path.join(self.dir, 'go')
        self.gtrain('launch', '-d', self.stepper_job('watched', '--until', done))
        self.wait_for_steps(2, ranks=2)
        for terminal in (True, False):
            attach = self.start('attach', 'watched', terminal=terminal)
            if terminal:
                attach.wait_for(r'   Ctrl-C detaches, the job goes on; gtrain stop watched-1 ends it\r\n')
                attach.type(b'\x03')
            else:
                attach.wait_for('step')
                attach.signal(signal.SIGINT)
            self.assertEqual(attach.wait(), 130, attach.output())
            self.assertRegex(attach.output().strip().splitlines()[-1],
                             r'gtrain: detached; watched-1 goes on. gtrain attach watched-1 \| gtrain stop watched-1')
            before = max(self.steps().values())
            self.wait_for_steps(before + 2, ranks=2)
        self.assertEqual(self.job('watched')['state'], 'RUNNING')
        open(done, 'w').close()
        self.end_local_cluster()


# ---- ranks between min and max
# ---- terminals and colours
# ---- errors once
# ---- plan and logs
# ---- JSON and completion
# ---- a million lines
# ---- the end

if __name__ == '__main__':
    harness.main()
