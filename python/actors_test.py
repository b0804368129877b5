"""gtrain.actors against the real libgtrain.so, as one process by hand. Several ranks: tests/e2e/actors_test.py."""
import os
import subprocess
import sys
import textwrap
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
BUILD = os.environ.get("GTRAIN_BUILD_DIR", os.path.join(os.path.dirname(HERE), "build"))

PROGRAM = """
import asyncio, sys, threading, time
import numpy as np
import gtrain
from gtrain import actors

@actors.actor
class Counter:
    def __init__(self, start=0):
        self.count = start
        self.running = 0
    def add(self, by, times=1):
        self.count += by * times
        return self.count
    def echo(self, *args, **kwargs):
        return [list(args), kwargs]
    def refuse(self, why):
        raise gtrain.InvalidArgument(why)
    def crash(self):
        raise ValueError("tired")
    def gives_itself(self):
        return self
    def waits(self, other):
        try:
            return other.add(1).result(1)
        except gtrain.FailedPrecondition as error:
            return str(error)
    def nap(self, seconds):
        time.sleep(seconds)
        return 'awake'
    async def of_both(self, other):
        self.running += 1
        assert self.running == 1, 'another call was admitted'
        sum = self.count + await other.add(0)
        await asyncio.sleep(0.01)
        self.running -= 1
        return sum
    async def fails(self, other):
        await other.refuse('by the other')

@actors.actor
class Parent:
    def __init__(self):
        self.children = []
    async def bear(self, count):
        for i in range(count):
            self.children.append(await actors.cluster().spawn(Counter, i, name=f'child/{i}'))
        return [child.reference for child in self.children]
    def let_go(self):
        self.children.clear()

@actors.actor
class Reader:
    async def total(self, object):
        self.array = await object.read()
        return float(self.array.sum()), self.array.ctypes.data
    def first(self):
        return float(self.array.flat[0])

async def error_of(call):
    try:
        await call
    except gtrain.GtrainError as error:
        return error.status, str(error)
    raise AssertionError('no error')

@DRIVE@
if __name__ == '__main__':
    sys.exit(actors.main(drive))
"""


class ActorsTest(unittest.TestCase):
    def drive(self, body, expect=0):
        source = PROGRAM.replace("@DRIVE@", "async def drive(cluster):\n" + textwrap.indent(textwrap.dedent(body), "    "))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GTRAIN_")}
        environment.update(GTRAIN_LIBRARY=os.path.join(BUILD, "lib", "libgtrain.so"), PYTHONPATH=HERE)
        done = subprocess.run([sys.executable, "-c", source], env=environment, text=True, capture_output=True, timeout=100)
        self.assertEqual(done.returncode, expect, done.stdout + done.stderr)
        return done.stdout, done.stderr

    def test_calls_arguments_and_results(self):
        self.drive("""
            counter = await cluster.spawn(Counter, 40)
            assert await counter.add(2) == 42
            assert await counter.add(by=1, times=8) == 50
            everything = [None, True, -5, 1 << 63, -1 << 63, 1.5, 'ä\\0', b'a\\0b', [1, [2, []]], {'a': {1: 2}}, float('inf')]
            got = await counter.echo(*everything, key=(1, 2))
            assert got == [everything, {'key': [1, 2]}], got
            for array in (np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros(0), np.ones((2, 0, 3), dtype=np.int8),
                          np.arange(9).reshape(3, 3).T, np.array(2.5)):
                (back,), _ = await counter.echo(array)
                assert back.dtype == array.dtype and back.shape == array.shape and (back == array).all(), back
                back += 1  # it is the caller's own
            assert cluster.processes == 1
        """)

    def test_objects(self):
        self.drive("""
            reader = await cluster.spawn(Reader)
            array = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
            owner = await cluster.put(array)
            total, address = await reader.total(owner)
            view = await owner.read()
            assert total == float(array.sum()) and (view == array).all() and view.shape == (512, 512)
            assert view.ctypes.data == address, 'a copy'
            try:
                view[0] = 1
                raise AssertionError('it was written')
            except ValueError:
                pass
            counter = await cluster.spawn(Counter)
            (name,), _ = await counter.echo(owner)
            assert (name.dtype, name.shape) == ('float32', (512, 512)), name
            owner.close()
            assert (await error_of(name.read()))[0] == 'NOT_FOUND'
            assert await reader.first() == 0.0, 'who has it goes on reading'
            later = (await cluster.put(bytearray(b'abc'))).let_go(after=60)
            assert bytes(await later.read()) == b'abc'
            import copy, pickle
            for one in (later, owner, await cluster.put(np.ones(3)), reader):
                assert 'Owner' not in type(copy.copy(one)).__name__ and 'Owner' not in type(copy.deepcopy(one)).__name__
                try:
                    pickle.dumps(one)
                    raise AssertionError('it was pickled')
                except TypeError:
                    pass
            try:
                view.flags.writeable = True
                raise AssertionError('it may be written')
            except ValueError:
                pass
            for array in (np.arange(9).reshape(3, 3).T, np.arange(6)[::2], np.arange(3, dtype='>i4')):
                assert (await (await cluster.put(array)).read() == array).all()
            empty = await cluster.put(np.zeros((0, 3), dtype=np.int8))
            assert (await empty.read()).shape == (0, 3)
        """)

    def test_detached_actors_and_several_calls_at_a_time(self):
        self.drive("""
            first = await cluster.spawn(Counter, 5, name='counter', detached=True)
            found = await cluster.find(Counter, 'counter')
            assert await found.add(1) == 6
            await cluster.end(first)
            assert (await error_of(cluster.find(Counter, 'counter')))[0] == 'NOT_FOUND'
            several = await cluster.spawn(Counter, concurrency=2)
            begun = time.monotonic()
            slow = several.nap(4)
            assert await several.add(1) == 1, 'beside the one that takes long'
            assert time.monotonic() - begun < 4
            assert (await error_of(cluster.spawn(Counter, concurrency=2, keep=True)))[0] == 'INVALID_ARGUMENT'
        """)

    def test_errors_say_what_happened(self):
        _, stderr = self.drive("""
            counter = await cluster.spawn(Counter, 1)
            other = await cluster.spawn(Counter, 5)
            await counter.add(1)
            assert await error_of(counter.refuse('not so')) == ('INVALID_ARGUMENT', 'not so')
            assert await counter.add(0) == 2
            assert await error_of(counter.crash()) == ('UNKNOWN', 'Counter.crash raised ValueError: tired')
            assert await counter.add(0) == 1, 'it is made anew'
            assert await error_of(counter.fails(other)) == ('INVALID_ARGUMENT', 'by the other')
            assert 'a coroutine do not wait' in await counter.waits(other)
            status, text = await error_of(counter.gives_itself())
            assert status == 'INVALID_ARGUMENT' and 'a Counter is no value of an actor' in text, text
            status, text = await error_of(counter.add(1, 2, 3, 4))
            assert status == 'UNKNOWN' and 'takes from 2 to 3 positional arguments' in text, text
            status, _ = await error_of(counter.within(0.05).nap(1))
            assert status == 'DEADLINE_EXCEEDED'
            for wrong in (lambda: counter.add(object()), lambda: counter.add(1 << 64), lambda: counter.within(0).add(1),
                          lambda: cluster.spawn(dict), lambda: cluster.spawn(Counter, on='moon'), lambda: cluster.spawn(Counter, rank=-1)):
                try:
                    wrong()
                    raise AssertionError('no error')
                except gtrain.InvalidArgument:
                    pass
            try:
                counter.subtract(1)
                raise AssertionError('no error')
            except AttributeError as error:
                assert 'have no method subtract; they have add, crash' in str(error), error
            for number in (np.int64(7), np.float32(2.5), np.bool_(True)):
                (back,), _ = await counter.echo(number)
                assert back == number and type(back) in (int, float, bool), back
            await counter.add(5)
            before = await counter.add(0)
            for wrong in ({(1, 2): 3}, {1: {(): 1}}):
                try:
                    counter.echo(wrong)
                    raise AssertionError('no error')
                except gtrain.InvalidArgument as error:
                    assert 'no key of a dict' in str(error)
            assert (await error_of(counter.gives_itself()))[0] == 'INVALID_ARGUMENT'
            assert await counter.add(0) == before, 'it was made anew'
            itself = []
            itself.append(itself)
            try:
                counter.echo(itself)
                raise AssertionError('no error')
            except gtrain.InvalidArgument as error:
                assert 'contains itself' in str(error)
        """)
        self.assertIn("ValueError: tired", stderr)  # where it was raised

    def test_coroutines_owners_and_references(self):
        self.drive("""
            counter = await cluster.spawn(Counter, 40)
            other = await cluster.spawn(Counter, 2)
            assert await counter.of_both(other) == 42
            assert await asyncio.gather(*[counter.of_both(other) for _ in range(20)]) == [42] * 20
            (ref,), _ = await counter.echo(other)
            assert ref == other and await ref.add(1) == 3
            parent = await cluster.spawn(Parent)
            children = await parent.bear(3)
            assert [await child.add(0) for child in children] == [0, 1, 2]
            found = await cluster.find(Counter, 'child/2')
            assert found == children[2]
            assert (await error_of(cluster.spawn(Counter, name='child/1')))[0] == 'ALREADY_EXISTS'
            assert (await error_of(cluster.find(Parent, 'child/1')))[0] == 'FAILED_PRECONDITION'
            await parent.let_go()
            assert (await error_of(children[2].add(0)))[0] == 'NOT_FOUND'
            assert (await error_of(cluster.find(Counter, 'child/2')))[0] == 'NOT_FOUND'
            with await cluster.spawn(Counter) as short:
                ref = short.reference
            assert (await error_of(ref.add(1)))[0] == 'NOT_FOUND'
            other.add.tell(5)
            assert await other.add(0) == 8
        """)

    def test_whichever_is_first(self):
        self.drive("""
            slow, quick = await cluster.spawn(Counter), await cluster.spawn(Counter)
            waiting = {asyncio.ensure_future(slow.nap(0.5)), asyncio.ensure_future(quick.nap(0))}
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert len(done) == 1 and len(waiting) == 1
            await asyncio.wait(waiting)
        """)

    def test_threads_wait_with_result(self):
        self.drive("""
            counter = await cluster.spawn(Counter)
            def many():
                for _ in range(200):
                    counter.add(1).result(10)
            threads = [threading.Thread(target=many) for _ in range(4)]
            for thread in threads:
                thread.start()
            await asyncio.to_thread(lambda: [thread.join() for thread in threads])
            assert await counter.add(0) == 800
        """)

    def test_a_driver_that_raises_is_exit_code_1(self):
        _, stderr = self.drive("raise RuntimeError('by the driver')", expect=1)
        self.assertIn("RuntimeError: by the driver", stderr)
        self.drive("await (await cluster.spawn(Counter)).refuse('x')", expect=1)


if __name__ == "__main__":
    unittest.main()
