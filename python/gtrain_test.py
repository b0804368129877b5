"""The Python package against the real libgtrain.so, as one rank by hand. Several ranks: examples/python_sgd."""
import array
import os
import pickle
import re
import subprocess
import sys
import tempfile
import unittest
import warnings
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(HERE)
BUILD = os.environ.get("GTRAIN_BUILD_DIR", os.path.join(SOURCE, "build"))
LIBRARY = os.path.join(BUILD, "lib", "libgtrain.so")
os.environ["GTRAIN_LIBRARY"] = os.environ.get("GTRAIN_LIBRARY", LIBRARY)
for name in [n for n in os.environ if n.startswith("GTRAIN_") and n not in ("GTRAIN_LIBRARY", "GTRAIN_BUILD_DIR",
                                                                            "GTRAIN_SOURCE_DIR")]:
    del os.environ[name]  # by hand, even when the tests themselves run under gtrain
sys.path.insert(0, HERE)

import numpy as np  # noqa: E402

import gtrain  # noqa: E402
from gtrain import _library  # noqa: E402


def run(code, **env):
    return subprocess.run([sys.executable, "-c", code], env=dict(os.environ, PYTHONPATH=HERE, **env), text=True,
                          capture_output=True, timeout=60)


class SessionTest(unittest.TestCase):
    def test_one_rank_by_hand(self):
        with gtrain.Session() as session:
            self.assertEqual((session.rank, session.world_size, session.managed), (0, 1, False))
            session.report(step=1, loss=0.5, samples=32)
            session.report(step=2)
            session.check_alive()
            self.assertFalse(session.stop_requested)
            self.assertFalse(session.stop_agreed())
            self.assertIsNone(session.preemption_notice)
        with self.assertRaisesRegex(gtrain.FailedPrecondition, "closed"):
            session.report(step=3)
        session.close()  # again is fine

    def test_collectives_on_arrays_and_buffers(self):
        with gtrain.Session() as session:
            for dtype in ("float32", "float64", "float16", "int32", "int64", "uint8", "int16", "uint64", "complex64"):
                data = np.arange(6, dtype=dtype).reshape(2, 3)
                self.assertIs(session.all_reduce(data), data)
                np.testing.assert_array_equal(data, np.arange(6).reshape(2, 3))
                gathered = session.all_gather(data)
                self.assertEqual((gathered.shape, gathered.dtype), ((1, 2, 3), data.dtype))
                np.testing.assert_array_equal(gathered[0], data)
            scalar = np.array(3.5)
            session.all_reduce(scalar, op="max")
            self.assertEqual(scalar, 3.5)
            session.all_reduce(np.empty(0, dtype=np.float32))
            plain = array.array("d", [1, 2, 3])
            session.broadcast(plain)
            self.assertEqual(plain[2], 3)
            raw = bytearray(8)
            session.all_reduce(raw, dtype="bfloat16")
            session.all_reduce(np.zeros(3, np.uint16), dtype="bfloat16")
            session.all_reduce(np.ones(3), dtype="float64")
            session.barrier()
            out = bytearray(4)
            session.all_gather(b"abcd", out=out)
            self.assertEqual(out, b"abcd")

    def test_collectives_of_the_communicator(self):
        with gtrain.Session() as session:
            comm, data = session.communicator, np.arange(4.0)
            self.assertIs(comm.reduce(data, op="mean"), data)
            truths = np.array([True, False])
            np.testing.assert_array_equal(comm.reduce(truths, op="bit_and"), [True, False])
            out = np.zeros(4)
            self.assertIs(comm.reduce_scatter(data, out), out)
            np.testing.assert_array_equal(out, data)
            np.testing.assert_array_equal(comm.all_to_all(data, np.zeros(4)), data)
            part = comm.split(3)
            self.assertEqual((part.rank, part.size), (0, 1))
            self.assertIs(part.all_reduce(data), data)
            part.close()
            self.assertIsNone(comm.split(-1))
            for wrong, text in [(lambda: comm.send(data, to=1), "not one of 1"),
                                (lambda: comm.send(data, to=0, tag=-1), "a tag is 0 or more"),
                                (lambda: comm.all_gather(data, counts=[3]), "must hold the 3"),
                                (lambda: comm.all_gather(data, np.zeros(5), counts=[4]), "whose sum is"),
                                (lambda: comm.receive(data, source=4), "not one of 1"),
                                (lambda: comm.reduce_scatter(data, np.zeros(3)), "must hold"),
                                (lambda: comm.all_to_all(data, np.zeros(5)), "must hold"),
                                (lambda: comm.reduce(data, op="average"), "sum, mean"),
                                (lambda: comm.reduce(data, op="bit_or"), "float64 has no bit_or")]:
                with self.assertRaisesRegex(gtrain.InvalidArgument, text):
                    wrong()

    def test_messages_of_a_rank_to_itself(self):
        with gtrain.Session() as session:
            comm, data = session.communicator, np.arange(5)
            comm.send(data, to=0, tag=3)
            got = np.zeros(9, dtype=data.dtype)
            receive = gtrain.Receive(got, gtrain.ANY_SOURCE, tag=gtrain.ANY_TAG)
            messages = [receive, gtrain.Send(data, to=0, tag=4)]
            self.assertIs(comm.exchange(messages), messages)
            self.assertEqual((receive.source, receive.tag, receive.count), (0, 3, 5))
            later = gtrain.Receive(got, source=0, tag=gtrain.ANY_TAG)
            request = comm.exchange([later], wait=False)
            self.assertEqual(request.wait(), [later])
            self.assertEqual((later.tag, later.count), (4, 5))
            np.testing.assert_array_equal(comm.gather(data), [data])
            np.testing.assert_array_equal(comm.scatter(data, np.zeros_like(data)), data)
            np.testing.assert_array_equal(comm.all_gather(data, counts=[5]), data)
            comm.set_timeout(30)
            memory = comm.allocate(400)
            numbers = np.frombuffer(memory, dtype=np.float32)
            numbers[:] = 3
            comm.all_reduce(numbers)
            self.assertEqual(numbers[99], 3)
            comm.free(memory)
            with self.assertRaisesRegex(gtrain.InvalidArgument, "Free not taken"):
                comm.free(memory)

    def test_reducer_and_compressed_mean(self):
        with gtrain.Session() as session:
            comm = session.communicator
            reducer = gtrain.Reducer(comm, [("a", (3, 4)), ("b", (5,))], compression="fp16", compress_from=1)
            for gradient in reducer.gradients:
                gradient[...] = 2.5
            reducer.ready(1)
            step = reducer.finish()
            self.assertEqual(step.unused, [0])
            self.assertEqual(reducer.gradients[0].shape, (3, 4))
            with self.assertRaisesRegex(gtrain.InvalidArgument, r"copy into it, reducer.gradients\[0\]\[...\] ="):
                reducer.gradients[0] = np.ones((3, 4), dtype=np.float32)
            np.testing.assert_array_equal(reducer.gradients[0], 2.5)
            with self.assertRaises(gtrain.InvalidArgument):
                reducer.ready(2)
            reducer.drop()
            reducer.close()
            with self.assertRaisesRegex(gtrain.FailedPrecondition, "closed"):
                reducer.ready(0)
            mean = gtrain.CompressedMean(comm, "topk density=0.1", 100)
            data = np.arange(100, dtype=np.float32)
            self.assertIs(mean.all_reduce(data), data)
            self.assertIn(mean.bytes_sent, range(1, data.nbytes + 1))
            with self.assertRaisesRegex(gtrain.InvalidArgument, "float32"):
                mean.all_reduce(np.arange(100))
            with self.assertRaises(gtrain.InvalidArgument):
                gtrain.CompressedMean(comm, "topk density=7", 100)

    def test_requests(self):
        with gtrain.Session() as session:
            data = np.ones(1000, dtype=np.float32)
            requests = [session.all_reduce(data, wait=False) for _ in range(50)]
            for request in requests:
                self.assertIs(request.wait(timeout=60), data)
                self.assertTrue(request.done())
            session.all_reduce(np.ones(10), wait=False)  # dropped: the buffer must outlive the operation
            session.barrier()

    def test_wrong_arguments_are_errors_that_say_what_to_do(self):
        with gtrain.Session() as session:
            grid = np.zeros((4, 4))
            for wrong, text in [(lambda: session.all_reduce(grid.T), "ascontiguousarray"),
                                (lambda: session.all_reduce([1, 2]), "numpy array"),
                                (lambda: session.all_reduce(b"1234"), r"read-only: pass bytearray\(data\)"),
                                (lambda: session.all_reduce(np.float32(0)), r"numpy\.zeros\(1, dtype='float32'\)"),
                                (lambda: session.all_reduce(np.frombuffer(bytes(8))), r"pass copy = numpy\.array"),
                                (lambda: session.all_reduce(memoryview(b"1234")), r"read-only: pass bytearray\(data\)"),
                                (lambda: session.all_reduce(np.zeros(3, dtype=np.complex128)), "not supported"),
                                (lambda: session.all_reduce(np.zeros(3, dtype=">f8")), "not supported"),
                                (lambda: session.all_reduce(np.zeros(3), op="average"), "sum, mean"),
                                (lambda: session.all_reduce(bytearray(3), dtype="float32"), "whole number"),
                                (lambda: session.all_reduce(np.ones(2), dtype="float32"), "are float64, not float32"),
                                (lambda: session.all_reduce(np.ones(2, np.float32), dtype="int32"), "are float32, not"),
                                (lambda: session.all_reduce(np.ones(2, np.int16), dtype="float64"), "are int16, not"),
                                (lambda: session.broadcast(grid, root=1), "root 1"),
                                (lambda: session.all_gather(grid, out=np.zeros(3)), "must hold"),
                                (lambda: session.broadcast(grid, root=2**32), "is not from"),
                                (lambda: session.communicator.split(2**32 - 1), "is not from"),
                                (lambda: session.communicator.split("red"), "no integer"),
                                (lambda: session.broadcast(grid, root=0.0), "no integer"),
                                (lambda: gtrain.Session(join_timeout=-1), "timeout")]:
                with self.assertRaisesRegex(gtrain.InvalidArgument, text):
                    wrong()
            session.barrier()  # none of them did harm

    def test_the_exception_that_ends_a_session_is_told_to_the_others(self):
        class Mute(Exception):
            def __str__(self):
                raise ValueError("no words")

        class Worse(Exception):
            def __str__(self):
                raise KeyboardInterrupt

        for error, said in [(ValueError("boom"), "ValueError: boom"), (AssertionError(), "AssertionError"),
                            (KeyboardInterrupt(), "KeyboardInterrupt"), (Mute(), "Mute"),
                            (Worse(), "Worse"), (ValueError("\udc80"), "ValueError: \\udc80"),
                            (SystemExit(0), None), (SystemExit(None), None), (SystemExit(75), None), (SystemExit(93), None),
                            (SystemExit("no data"), None), (GeneratorExit(), None)]:
            with self.subTest(repr(error) if said not in ("Mute", "Worse") else said):
                abort = mock.Mock()
                with mock.patch.object(_library.load(), "gtrain_communicator_abort", abort):
                    with self.assertRaises(type(error)):
                        with gtrain.Session() as session:
                            comm = session.communicator
                            part, other = comm.split(0), gtrain.Communicator(session)
                            closed = comm.split(0)
                            closed.close()
                            raise error
                self.assertEqual([call.args[1] for call in abort.call_args_list], [said.encode()] * 3 if said else [])
                for one in (comm, part, other) if said else (comm,):
                    with self.assertRaisesRegex(gtrain.FailedPrecondition, "closed"):
                        one.barrier()

    def test_forked_child_is_inert(self):
        with gtrain.Session() as session:
            session.barrier()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    session.barrier()
                except gtrain.FailedPrecondition as error:
                    code = 0 if "forked" in str(error) else 2
                finally:
                    session.close()
                    os._exit(code)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
            session.barrier()


class CheckpointTest(unittest.TestCase):
    def test_saves_and_restores_named_arrays(self):
        with tempfile.TemporaryDirectory() as folder, gtrain.Session() as session:
            weights, counter, own = np.arange(12.0).reshape(3, 4), np.array([5]), np.array([7], dtype=np.uint8)
            with gtrain.Checkpointer(session, uri=folder + "/ckpt", every_steps=2) as checkpointer:
                checkpointer.replicated({"model/weights": weights}, counter=counter)
                checkpointer.per_rank("own", own)
                with self.assertRaisesRegex(gtrain.InvalidArgument, "twice"):
                    checkpointer.per_rank("own", own)
                self.assertIsNone(checkpointer.restore())
                self.assertIsNone(checkpointer.last_committed)
                self.assertFalse(checkpointer.save_if_due(1))
                self.assertTrue(checkpointer.save_if_due(2))
                checkpointer.wait()
                self.assertEqual(checkpointer.last_committed, 2)
            weights[:], counter[:], own[:] = 0, 0, 0
            with gtrain.Checkpointer(session, uri=folder + "/ckpt") as checkpointer:
                checkpointer.replicated({"model/weights": weights, "counter": counter})
                checkpointer.per_rank("own", own)
                self.assertEqual(checkpointer.restore(), 2)
            np.testing.assert_array_equal(weights, np.arange(12.0).reshape(3, 4))
            self.assertEqual((counter[0], own[0]), (5, 7))

    def test_a_read_only_open_looks_and_takes_nothing(self):
        with tempfile.TemporaryDirectory() as folder, gtrain.Session() as session:
            weights = np.full(10, 1.0)
            with gtrain.Checkpointer(session, uri=folder + "/ckpt", max_rollback=0, verify_replicas="off") as trainer:
                trainer.replicated(weights=weights)
                self.assertTrue(trainer.save(1))
                trainer.wait()
                copy = np.zeros(10)
                with gtrain.Checkpointer(session, uri=folder + "/ckpt", read_only=True) as reader:
                    reader.replicated(weights=copy)
                    self.assertEqual(reader.restore(), 1)
                    with self.assertRaisesRegex(gtrain.FailedPrecondition, "read-only"):
                        reader.save(2)
                self.assertTrue((copy == 1).all())
                with self.assertRaisesRegex(gtrain.FailedPrecondition, "is in use"):
                    gtrain.Checkpointer(session, uri=folder + "/ckpt")
                with gtrain.Checkpointer(session, uri=folder + "/ckpt", takeover=True) as taker:
                    taker.replicated(weights=copy)
                    self.assertEqual(taker.restore(), 1)
            with self.assertRaises(gtrain.InvalidArgument):
                gtrain.Checkpointer(session, uri=folder + "/other", verify_replicas="sometimes")
            with self.assertRaises(gtrain.InvalidArgument):
                gtrain.Checkpointer(session, uri=folder + "/other", max_rollback=-2)

    def test_lazy_saves_are_fenced(self):
        with tempfile.TemporaryDirectory() as folder, gtrain.Session() as session:
            weights = np.full(1000, 1.0)
            with gtrain.Checkpointer(session, uri=folder + "/ckpt", lazy=True) as checkpointer:
                checkpointer.replicated(weights=weights)
                self.assertIsNone(checkpointer.restore())
                self.assertTrue(checkpointer.save(1))
                checkpointer.fence()
                weights[:] = 2
                checkpointer.wait()
                self.assertTrue(checkpointer.save(2))
                weights[:] = 3  # the fence is forgotten
                self.assertFalse(checkpointer.save_if_due(3))
                with self.assertRaisesRegex(gtrain.FailedPrecondition, "Fence"):
                    checkpointer.wait()
                self.assertEqual(checkpointer.restore(), 1)
            self.assertTrue((weights == 1).all())

    def test_every_type_keeps_its_shape(self):
        with tempfile.TemporaryDirectory() as folder, gtrain.Session() as session:
            def arrays(value):
                return {name: np.full((2, 3), value, name) for name in
                        ("bool", "int8", "int16", "uint16", "uint32", "uint64", "complex64", "float16", "int32", "float64")}
            saved = arrays(1)
            saved["complex64"][1, 2] = 3 - 4j
            bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
            codes = np.arange(6, dtype=np.uint8).reshape(3, 2)
            with gtrain.Checkpointer(session, uri=folder + "/ckpt") as checkpointer:
                checkpointer.replicated(saved, bits=(bits, "bfloat16"), codes=(codes, "float8_e4m3fn"))
                checkpointer.save(1)
                checkpointer.wait()
            again, bits_again, codes_again = arrays(0), np.zeros_like(bits), np.zeros_like(codes)
            with gtrain.Checkpointer(session, uri=folder + "/ckpt") as checkpointer:
                checkpointer.replicated(again, bits=(bits_again, "bfloat16"), codes=(codes_again, "float8_e4m3fn"))
                self.assertEqual(checkpointer.restore(), 1)
            for name in saved:
                np.testing.assert_array_equal(again[name], saved[name])
            np.testing.assert_array_equal(bits_again, bits)
            np.testing.assert_array_equal(codes_again, codes)
            with gtrain.Checkpointer(session, uri=folder + "/ckpt") as checkpointer:
                with self.assertRaisesRegex(gtrain.InvalidArgument, "complex128"):
                    checkpointer.replicated(w=np.zeros(2, np.complex128))
                with self.assertRaisesRegex(gtrain.InvalidArgument, "byte order"):
                    checkpointer.replicated(w=np.zeros(2, ">f4"))
                checkpointer.replicated({**arrays(0), "codes": (codes, "float8_e4m3fn"), "bits": (bits, "float16")})
                with self.assertRaisesRegex(gtrain.FailedPrecondition, r"\"bits\" is BF16\[2,3\] there and F16\[2,3\] here"):
                    checkpointer.restore()

    def test_arrays_of_other_packages_are_taken_as_they_are(self):
        class Tensor:  # what is asked of torch
            device = type("Device", (), {"type": "cpu"})()

            def __init__(self, array, dtype):
                self.array, self.shape, self.dtype = array, array.shape, "torch." + dtype

            def data_ptr(self):
                return self.array.ctypes.data

            def element_size(self):
                return self.array.itemsize

            def is_contiguous(self):
                return self.array.flags.c_contiguous

            def is_conj(self):
                return False

            is_neg = is_conj

        tensors = {"fake": Tensor(np.arange(6, dtype=np.uint16).reshape(2, 3), "bfloat16")}
        expected = {"fake": tensors["fake"].array.tobytes()}
        try:
            import ml_dtypes
            for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
                tensors[name] = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name))
                expected[name] = tensors[name].tobytes()
        except ImportError:
            pass
        try:
            import torch
            tensors["torch"] = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).requires_grad_()
            expected["torch"] = tensors["torch"].detach().view(torch.int16).tolist()
        except ImportError:
            torch = None
        with tempfile.TemporaryDirectory() as folder, gtrain.Session() as session:
            with gtrain.Checkpointer(session, uri=folder + "/ckpt") as checkpointer:
                checkpointer.replicated(tensors)
                checkpointer.save(1)
                checkpointer.wait()
            for tensor in tensors.values():
                if isinstance(tensor, Tensor):
                    tensor.array[:] = 0
                elif torch is not None and isinstance(tensor, torch.Tensor):
                    tensor.detach().zero_()
                else:
                    tensor[:] = 0
            with gtrain.Checkpointer(session, uri=folder + "/ckpt") as checkpointer:
                checkpointer.replicated(tensors)
                self.assertEqual(checkpointer.restore(), 1)
            self.assertEqual(tensors["fake"].array.tobytes(), expected["fake"])
            for name in expected:
                if name.startswith(("bfloat16", "float8")):
                    self.assertEqual(tensors[name].tobytes(), expected[name])
            if torch is not None:
                self.assertEqual(tensors["torch"].detach().view(torch.int16).tolist(), expected["torch"])
            with gtrain.Checkpointer(session, uri=folder + "/ckpt") as checkpointer:
                far = Tensor(np.zeros(2, np.uint16), "bfloat16")
                far.device = type("Device", (), {"type": "cuda", "__str__": lambda _: "cuda:0"})()
                with self.assertRaisesRegex(gtrain.InvalidArgument, "lies on cuda:0"):
                    checkpointer.replicated(w=far)
                with self.assertRaisesRegex(gtrain.InvalidArgument, "not contiguous"):
                    checkpointer.replicated(w=Tensor(np.zeros((4, 4), np.uint16)[:, ::2], "bfloat16"))

    def test_boxes_bytes_and_what_may_be_missing(self):
        with tempfile.TemporaryDirectory() as folder, gtrain.Session() as session:
            w, state = np.arange(12.0).reshape(3, 4), {"epoch": 1}

            def register(checkpointer, save, load):
                checkpointer.boxed("w", w, (3, 4), (0, 0))
                checkpointer.boxed("none", None, (0, 4), (0, 0), dtype="uint8")
                checkpointer.bytes("loader", save=save, load=load, rule="merge")
            with gtrain.Checkpointer(session, uri=folder + "/ckpt") as checkpointer:
                register(checkpointer, lambda: pickle.dumps(state), self.fail)
                with self.assertRaisesRegex(gtrain.InvalidArgument, "twice"):
                    checkpointer.bytes("loader", save=bytes, load=print)
                for step in (1, 2):
                    state["history"] = [step] * step * 1000
                    self.assertTrue(checkpointer.save(step))
                    checkpointer.wait()
            found = []
            expected, w[:] = w.copy(), 0
            with gtrain.Checkpointer(session, uri=folder + "/ckpt") as checkpointer:
                register(checkpointer, lambda: 1 / 0, lambda data: found.append(pickle.loads(data)))
                checkpointer.replicated(lora=np.ones(3))
                with self.assertRaisesRegex(gtrain.FailedPrecondition, "\"lora\" is not in it"):
                    checkpointer.restore()
                self.assertEqual(checkpointer.restore(may_be_missing=["lor*"]), 2)
                with self.assertRaises(ZeroDivisionError):
                    checkpointer.save(3)
            np.testing.assert_array_equal(w, expected)
            self.assertEqual(found, [{"epoch": 1, "history": [2] * 2000}])
            with gtrain.Checkpointer(session, uri=folder + "/ckpt") as checkpointer:
                with self.assertRaisesRegex(gtrain.InvalidArgument, "outside of"):
                    checkpointer.boxed("w", w, (3, 4), (1, 0))
                with self.assertRaisesRegex(gtrain.InvalidArgument, "3 dimensions"):
                    checkpointer.boxed("w", w, (3, 4, 1), (0, 0, 0))
                with self.assertRaisesRegex(gtrain.InvalidArgument, "no such rule: merges"):
                    checkpointer.bytes("b", save=bytes, load=print, rule="merges")
                with self.assertRaisesRegex(gtrain.InvalidArgument, "cannot be merged"):
                    checkpointer.per_rank("own", w, rule="merge")

    def test_chunks_are_those_of_torch(self):
        mesh = gtrain.Mesh(tp=4)
        sizes = [(box[0].start, box[0].stop) for box in (mesh.box((10,), rank, split=[(0, "tp", "chunk")]) for rank in range(4))]
        self.assertEqual(sizes, [(0, 3), (3, 6), (6, 9), (9, 10)])
        with self.assertRaisesRegex(gtrain.InvalidArgument, "no such rule of a split: chunks"):
            mesh.box((10,), 0, split=[(0, "tp", "chunks")])

    def test_parts_of_tensors(self):
        mesh = gtrain.Mesh(dp=2, pp=2, tp=3)
        self.assertEqual((mesh.size, mesh.coordinates(5)), (12, {"dp": 0, "pp": 1, "tp": 2}))
        self.assertEqual(mesh.box((4, 8), 5, split=[(1, "tp")]), (slice(0, 4), slice(6, 8)))
        self.assertEqual(mesh.box((7,), 5, split=[(0, "tp"), (0, "dp")]), (slice(5, 6),))
        self.assertIsNone(mesh.box((4, 8), 5, only={"pp": 0}))
        with self.assertRaisesRegex(gtrain.InvalidArgument, "no axis \"ep\""):
            mesh.box((4,), 0, split=[(0, "ep")])

    def test_a_part_of_the_wrong_shape_is_refused(self):
        with tempfile.TemporaryDirectory() as folder, gtrain.Session() as session:
            with gtrain.Checkpointer(session, uri=folder + "/ckpt") as checkpointer:
                one = gtrain.Mesh(tp=1)
                with self.assertRaisesRegex(gtrain.InvalidArgument, "this rank holds \\(4, 6\\)"):
                    checkpointer.sharded("w", np.zeros((6, 4)), (4, 6), one, split=[(0, "tp")])
                with self.assertRaisesRegex(gtrain.InvalidArgument, "dtype"):
                    checkpointer.sharded("w", None, (4, 6), one)
                with self.assertRaisesRegex(gtrain.InvalidArgument, "has 2 ranks"):
                    checkpointer.sharded("w", np.zeros((2, 6)), (4, 6), gtrain.Mesh(tp=2), split=[(0, "tp")])
                checkpointer.sharded("w", np.zeros((4, 6)), (4, 6), one, split=[(0, "tp")])
                self.assertIsNone(checkpointer.restore())
                self.assertEqual(checkpointer.restored_bytes, (0, 0))

    def test_without_a_place_the_error_says_so(self):
        with gtrain.Session() as session:
            with self.assertRaises(gtrain.GtrainError) as caught:
                gtrain.Checkpointer(session)
            self.assertRegex(str(caught.exception), "uri|checkpoint")


class LibraryTest(unittest.TestCase):
    def test_is_found_or_the_error_lists_where_it_was_looked_for(self):
        self.assertTrue(gtrain.library_path().endswith("libgtrain.so"))
        self.assertRegex(gtrain.version(), r"^\d+\.\d+\.\d+$")
        missing = run("import gtrain; gtrain.Session()", GTRAIN_LIBRARY="absent/libgtrain.so")
        self.assertIn("absent/libgtrain.so does not exist", missing.stderr)
        self.assertIn("make build", missing.stderr)
        other = run("import gtrain; gtrain.Session()", GTRAIN_LIBRARY="libc.so.6")
        self.assertIn("libc.so.6 is not a libgtrain.so", other.stderr)

    def test_writes_nothing_and_installs_no_handler(self):
        result = run("import gtrain, signal\n"
                     "before = [signal.getsignal(s) for s in signal.valid_signals()]\n"
                     "s = gtrain.Session(); s.barrier()\n"
                     "assert before == [signal.getsignal(s) for s in signal.valid_signals()]\n"
                     "gtrain.set_log(lambda level, text: None); gtrain.set_log(None)\n")
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))

    def test_warnings_go_to_stderr_unless_the_program_says_otherwise(self):
        with tempfile.TemporaryDirectory() as folder:
            lost = ("with gtrain.Session() as s, gtrain.Checkpointer(s, uri=%r, lazy=True) as c:\n"
                    "    c.replicated(w=array.array('f', [1, 2]))\n"
                    "    c.restore()\n"
                    "    c.save(1)\n" % os.path.join(folder, "ckpt"))  # and no fence
            told = run("import array, gtrain\n" + lost)
            self.assertEqual(told.returncode, 0, told.stderr)
            self.assertRegex(told.stderr, r"gtrain: .*step 1 is not saved.*Fence\(\) was not called")
            silent = run("import array, gtrain\ngtrain.set_log(None)\n" + lost)
            self.assertEqual((silent.returncode, silent.stderr), (0, ""))

    def test_declares_every_function_of_the_headers(self):
        declared = set()
        for name in ("gtrain_c.h", "elastic_c.h", "actor_c.h", "object_c.h"):
            with open(os.path.join(SOURCE, "include", "gtrain", name)) as header:
                declared |= set(re.findall(r"\b(gtrain_[a-z_]+)\(", header.read()))
        self.assertEqual(declared, set(_library._FUNCTIONS))


class ElasticTest(unittest.TestCase):
    def fit(self, session, **options):
        """A weight and an offset of 3 x - 2, and the samples in the order in which they were trained."""
        run = gtrain.Elastic(session, **{"samples": 100, "epochs": 3, "global_batch": 8, "seed": 3, **options})
        w = run.state("w", np.zeros(2, dtype=np.float32))
        g = run.gradient(np.ones(2, dtype=np.float32))
        seen, numbers = [], []
        for step in run:
            self.assertFalse(g.any(), "zeros when a step begins")
            x = np.sin(step.samples)
            off = w[0] * x + w[1] - (3 * x - 2)
            g += [(2 * off * x).sum(), (2 * off).sum()]
            run.ready(0)
            self.assertTrue(step.apply((off ** 2).sum(), lambda: np.subtract(w, np.float32(0.3) * g, out=w)))
            with self.assertRaisesRegex(gtrain.FailedPrecondition, "was applied"):
                step.apply(0, lambda: None)
            seen.append(step.samples)
            numbers.append((step.number, step.epoch, step.batch))
        return w, np.concatenate(seen), numbers

    def test_by_hand(self):
        with gtrain.Session(stay=True) as session:
            w, seen, numbers = self.fit(session, epochs=30)
            np.testing.assert_allclose(w, [3, -2], atol=0.01)
            for epoch in range(30):
                self.assertEqual(sorted(seen[100 * epoch:100 * (epoch + 1)]), list(range(100)))
            self.assertEqual(numbers[:2], [(1, 0, 8), (2, 0, 8)])
            self.assertEqual(numbers[12:14], [(13, 0, 4), (14, 1, 8)], "the short batch at the end of an epoch")
            with self.assertRaisesRegex(gtrain.FailedPrecondition, "by hand"):
                session.rejoin()

    def test_the_words_of_the_job_file_compress(self):
        with unittest.mock.patch.dict(os.environ, GTRAIN_COMPRESSION="powersgd rank=1 warmup=0"), gtrain.Session(stay=True) as session:
            run = gtrain.Elastic(session, samples=4, global_batch=2)
            g = run.gradient(np.zeros((300, 100), dtype=np.float32))  # of rank 3: powersgd sends rank 1 of it
            run.gradient(np.zeros(7, dtype=np.float32))
            given = np.random.default_rng(1).normal(size=(300, 3)) @ np.random.default_rng(2).normal(size=(3, 100))
            for step in run:
                g += 2 * given.astype(np.float32)
                self.assertTrue(step.apply(0, lambda: self.assertEqual(np.linalg.matrix_rank(g, 1e-3), 1)))
            run = gtrain.Elastic(session, samples=4, global_batch=2)
            run.gradient(np.zeros(4, dtype=np.float32))
            with self.assertRaisesRegex(gtrain.InvalidArgument, "powersgd compresses matrices"):
                next(iter(run))

    def parts(self, session):
        """The parts of all steps, as (step, virtual rank, seed, samples), and the loss that was reported last."""
        run = gtrain.Elastic(session, samples=20, global_batch=10, seed=3)
        g = run.gradient(np.zeros(2, dtype=np.float32))
        seen = []
        for step in run:
            whole = []
            for part in step.parts():
                self.assertFalse(g.any(), "zeros when a part begins")
                g += part.samples.size * np.float32(2)
                run.ready(0)
                part.loss = 1
                whole += list(part.samples)
                seen.append((step.number, part.virtual_rank, part.seed, list(part.samples)))
            self.assertEqual(whole, list(step.samples))
            self.assertTrue(step.apply(lambda: self.assertEqual(list(g), [2, 2], "the mean over all parts")))
        return seen

    def warnings_of(self, session, update, pull=1.0, size=4):
        """What is warned of in two steps whose gradient is `pull`; `update` gets state and gradient."""
        run = gtrain.Elastic(session, samples=20, global_batch=10)
        w = run.state("w", np.zeros(size, dtype=np.float32))
        g = run.gradient(np.zeros(2, dtype=np.float32))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in run:
                g[:] = pull
                step.apply(1.0, lambda: update(w, g))
        return [(os.path.basename(one.filename), str(one.message)) for one in said]

    def test_an_update_that_binds_the_name_anew_is_said_once(self):
        def binds_anew(w, g):
            w = w - g[0]

        def writes(w, g):
            w -= g[0]

        def writes_the_last(w, g):
            w[-1] = g[0]

        with gtrain.Session(stay=True) as session:
            ((where, said),) = self.warnings_of(session, binds_anew)
            self.assertEqual(where, "gtrain_test.py")
            self.assertRegex(said, r"changed none of the registered state.*\(w = w - \.\.\.\).*w -= ")
            self.assertEqual(len(self.warnings_of(session, binds_anew, size=1 << 20)), 1)
            self.assertEqual(self.warnings_of(session, binds_anew, pull=0.0), [], "nothing was to be changed")
            for size in (4, 1 << 20):
                for update in (writes, writes_the_last):
                    self.assertEqual(self.warnings_of(session, update, size=size), [])

    def test_a_step_has_one_part(self):
        with gtrain.Session(stay=True) as session:
            parts = self.parts(session)
            self.assertEqual([(step, rank, len(samples)) for step, rank, _, samples in parts], [(1, 0, 10), (2, 0, 10)])

    def test_a_bitwise_step_has_virtual_ranks(self):
        with unittest.mock.patch.dict(os.environ, GTRAIN_VIRTUAL_RANKS="4"), gtrain.Session(stay=True) as session:
            parts = self.parts(session)
            self.assertEqual([(step, rank, len(samples)) for step, rank, _, samples in parts],
                             [(step, rank, (3, 3, 2, 2)[rank]) for step in (1, 2) for rank in range(4)])
            self.assertEqual(len({seed for _, _, seed, _ in parts}), 8)
            whole = gtrain.Elastic(session, samples=20, global_batch=10)
            for step in whole:
                with self.assertRaisesRegex(gtrain.FailedPrecondition, r"0 of the 4 parts .*step\.parts\(\)"):
                    step.apply(1.0, lambda: self.fail("nothing is changed"))
                break
            left = gtrain.Elastic(session, samples=20, global_batch=10)
            for step in left:
                next(iter(step.parts()))
                with self.assertRaisesRegex(gtrain.FailedPrecondition, "0 of the 4 parts"):
                    step.apply(lambda: self.fail("nothing is changed"))
                break
            with self.assertRaisesRegex(gtrain.InvalidArgument, "`out` is NULL"):
                _library.call("gtrain_elastic_next_part", left._handle, 0.0, None)
            with self.assertRaisesRegex(gtrain.FailedPrecondition, "Begin comes first"):
                next(iter(step.parts()))

    def test_a_program_of_a_mesh_runs_by_hand(self):
        with gtrain.Session(stay=True) as session:
            self.assertEqual(session.mesh.axes, {"dp": 1})
            run = gtrain.Elastic(session, samples=6, global_batch=2)
            self.assertEqual(run.part((4, 6), split=[(1, "tp")]), (slice(0, 4), slice(0, 6)))
            self.assertEqual(run.part((4,), only={"pp": 0}), (slice(0, 4),))
            for wrong in ("tp", (1, "tp"), [(1,)]):
                with self.assertRaisesRegex(gtrain.InvalidArgument, r'as \[\(1, "tp"\)\]'):
                    run.part((4, 6), split=wrong)
            with self.assertRaisesRegex(gtrain.FailedPrecondition, "no step yet"):
                run.evaluate(4, lambda begin, end: 0)
            for wrong, said in (("dp", "along dp"), ("xp", "there is no axis xp")):
                with self.assertRaisesRegex(gtrain.InvalidArgument, said):
                    run.part((4, 6), split=[(1, wrong)])
            w = run.sharded("w", np.ones((4, 6), dtype=np.float32), (4, 6), split=[(1, "tp")])
            with self.assertRaisesRegex(gtrain.InvalidArgument, "has 24 elements, not 5"):
                run.sharded("v", np.zeros(5, dtype=np.float32), (4, 6), split=[(0, "pp")])
            g = run.gradient(np.zeros((4, 6), dtype=np.float32))
            with self.assertRaisesRegex(gtrain.FailedPrecondition, "ranks along an axis meet"):
                run.along("tp")
            steps = []

            def body(step):
                sums = np.array([w.sum()])
                tp = run.along("tp")
                self.assertEqual((tp.rank, tp.size), (0, 1))
                tp.all_reduce(sums)
                self.assertEqual(sums[0], w.sum())
                with self.assertRaisesRegex(gtrain.InvalidArgument, "no axis zp"):
                    run.along("zp")
                g[:] = 2
                step.apply(1.0, lambda: np.add(w, g, out=w))
                steps.append(step.number)

            run.train(body)
            self.assertEqual(steps, [1, 2, 3])
            self.assertTrue((w == 4).all())
            self.assertEqual(run.evaluate(5, lambda begin, end: float(run.along("pp").size * (end - begin))), 5)

            def fails(_):
                raise gtrain.Unavailable("a server of the program's")
            again = gtrain.Elastic(session, samples=2, global_batch=2)
            with self.assertRaisesRegex(gtrain.Unavailable, "of the program's"):
                again.train(fails)

    def test_what_a_program_says_and_hears(self):
        """Its own compression and checkpoints, what a step says, and sums over the ranks."""
        with tempfile.TemporaryDirectory() as folder, gtrain.Session(stay=True) as session:
            def run(samples):
                run = gtrain.Elastic(session, samples=samples, global_batch=2, compression="topk density=0.1 warmup=1",
                                     uri=folder, every_steps=100)
                w = run.state("w", np.zeros((200, 100), dtype=np.float32))
                g = run.gradient(np.zeros((200, 100), dtype=np.float32))
                given = np.random.default_rng(1).normal(size=g.shape).astype(np.float32)
                steps = []
                for step in run:
                    self.assertEqual(step.steps, samples / 2)
                    g += 2 * given
                    step.apply(3, lambda: np.add(w, g, out=w))
                    self.assertEqual(step.loss, 1.5)
                    self.assertEqual(step.reduced.wanted, 0 if step.number == 1 else 2000)
                    owed = step.number * given - w  # by all steps so far
                    residual = run.residual()
                    self.assertAlmostEqual(residual.norm, np.linalg.norm(owed), delta=1e-3)
                    self.assertEqual(residual.lost, 0)
                    self.assertEqual(run.evaluate(7, lambda begin, end: end - begin), 7)
                    steps.append(step.number)
                self.assertEqual(run.evaluate(9, lambda begin, end: 2 * (end - begin)), 18)
                return steps
            self.assertEqual(run(6), [1, 2, 3])
            with gtrain.Checkpointer(session, uri=folder, read_only=True) as checkpointer:
                w = np.zeros((200, 100), dtype=np.float32)
                checkpointer.replicated(w=w)  # has the shape that it was registered with
                self.assertEqual(checkpointer.restore(may_be_missing=["*"]), 3)
                self.assertTrue(w.any())
            early = gtrain.Elastic(session, samples=100, global_batch=2)
            for step in early:
                if step.number == 3:
                    early.stop()
                step.apply(0, lambda: None)
            self.assertEqual((step.number, early.stopped), (3, True), "behind the step that it is in")
            with self.assertRaisesRegex(gtrain.InvalidArgument, "is not a codec"):
                gtrain.Elastic(session, samples=6, global_batch=2, compression="zip")

    def test_errors_of_the_caller(self):
        with gtrain.Session(place_later=True) as session:
            twice = gtrain.Elastic(session, samples=10, global_batch=5)
            twice.gradient(np.zeros(2, dtype=np.float32))
            for step in twice:
                for wrong in (1, -1, 2**70):
                    with self.assertRaisesRegex(gtrain.InvalidArgument, f"there is no gradient {wrong}: 1 are"):
                        twice.ready(wrong)
                twice.ready(0)
                twice.ready(0)
                with self.assertRaisesRegex(gtrain.InvalidArgument, "ready for the second time"):
                    step.apply(0, lambda: None)
                break
            with self.assertRaisesRegex(gtrain.InvalidArgument, "samples"):
                gtrain.Elastic(session, samples=0, global_batch=8)
            forgotten = gtrain.Elastic(session, samples=10, global_batch=5)
            with self.assertRaisesRegex(gtrain.FailedPrecondition, r"would come for ever\. Each step ends with step\.apply\("):
                for _ in forgotten:
                    pass
            run = gtrain.Elastic(session, samples=10, global_batch=5)
            with self.assertRaisesRegex(gtrain.InvalidArgument, "float32|bits|dtype|elements"):
                run.gradient(np.zeros(3))
            with self.assertRaisesRegex(gtrain.InvalidArgument, r"read-only .* pass numpy\.zeros\(1, dtype='float32'\)"):
                run.state("q", np.float32(0))
            w = run.state("w", np.zeros(3))
            with self.assertRaisesRegex(gtrain.InvalidArgument, "named w already"):
                run.state("w", w)
            for step in run:
                with self.assertRaisesRegex(gtrain.FailedPrecondition, "before the first step"):
                    run.state("late", w)
                with self.assertRaisesRegex(ZeroDivisionError, "division"):
                    step.apply(0, lambda: 1 / 0)
                break
            with self.assertRaisesRegex(gtrain.FailedPrecondition, "not said to be applied"):
                next(iter(run))


class SamplesTest(unittest.TestCase):
    def setUp(self):
        self.session = gtrain.Session()
        self.addCleanup(self.session.close)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def samples(self, **options):
        return gtrain.Samples(self.session, **{"samples": 10, "epochs": 2, "global_batch": 4, "seed": 1, **options})

    def restored(self, data, **options):
        """What a restore into `data` says."""
        with gtrain.Checkpointer(self.session, uri=self.folder, **options) as checkpointer:
            checkpointer.add_samples(data)
            return checkpointer.restore()

    def test_each_sample_of_each_epoch_once(self):
        data = self.samples()
        self.assertEqual((len(data), data.steps, data.step, data.epoch, data.done), (6, 6, 0, 0, False))
        epochs, totals = [[], []], []
        for batch in data:
            epochs[(data.step - 1) // 3].extend(int(sample) for sample in batch)
            totals.append(data.total)
        self.assertEqual([sorted(epoch) for epoch in epochs], [list(range(10))] * 2)
        self.assertNotEqual(epochs[0], epochs[1])
        self.assertEqual(totals, [4, 4, 2, 4, 4, 2])
        self.assertEqual((data.step, data.epoch, data.done, len(data)), (6, 2, True, 0))
        with self.assertRaisesRegex(gtrain.FailedPrecondition, "all epochs of the data are trained"):
            data.next()
        self.assertEqual([len(batch) for batch in self.samples(drop_last=True)], [4, 4, 4, 4])
        in_order = self.samples(shuffle=False, epochs=1, global_batch=10)
        self.assertEqual(list(in_order.next()), list(range(10)))

    def test_goes_on_where_the_checkpoint_was(self):
        data = self.samples()
        with gtrain.Checkpointer(self.session, uri=self.folder) as checkpointer:
            checkpointer.add_samples(data)
            self.assertIsNone(checkpointer.restore())
            taken = [list(data.next()) for _ in range(2)]
            self.assertTrue(checkpointer.save(data.step))
            checkpointer.wait()
            data.next()  # of which no checkpoint knows
        again = self.samples(epochs=3)
        self.assertEqual(self.restored(again), 2)
        self.assertEqual((again.step, again.epoch, again.offset), (2, 0, 8))
        self.assertEqual(sorted(sum(taken, []) + list(again.next())), list(range(10)))
        larger = self.samples(global_batch=7)
        self.assertEqual(self.restored(larger), 2)
        self.assertEqual([len(batch) for batch in larger], [2, 7, 3])
        for other in ({"seed": 2}, {"samples": 11}, {"shuffle": False}, {"drop_last": True}):
            with self.assertRaisesRegex(gtrain.InvalidArgument, "the data was begun with " + next(iter(other))):
                self.restored(self.samples(**other))
        with self.assertRaisesRegex(gtrain.GtrainError, "samples/test"):
            self.restored(self.samples(name="test"))

    def test_a_loader_reads_ahead(self):
        data = self.samples()
        ahead = list(data.batches())
        self.assertEqual(data.step, 0, "reading moves nothing")
        trained, totals = [], []
        for batch in data.batches():
            trained.append(list(batch))
            totals.append(data.batch)
            data.advance()
        self.assertEqual(totals, [4, 4, 2, 4, 4, 2], "what a mean divides by")
        self.assertEqual(data.batch, 0)
        self.assertEqual([list(batch) for batch in ahead], trained)
        self.assertTrue(data.done)
        fresh = self.samples()
        with self.assertRaisesRegex(gtrain.FailedPrecondition, "share of the batch was not asked for"):
            fresh.advance()
        self.assertEqual(list(fresh.peek(5)), trained[5])
        self.assertEqual(list(fresh.peek(6)), [], "behind the end")

    def test_shares_of_a_mesh(self):
        shares = [self.samples(share=i, shares=3, epochs=1, global_batch=10).next() for i in range(3)]
        self.assertEqual([len(share) for share in shares], [4, 3, 3])
        self.assertEqual(sorted(int(sample) for share in shares for sample in share), list(range(10)))

    def test_without_numpy(self):
        with mock.patch.dict(sys.modules, {"numpy": None}):
            batch = self.samples().next()
        self.assertIsInstance(batch, array.array)
        self.assertEqual(len(batch), 4)

    def test_wrong_words(self):
        for options, said in (({"samples": 0}, "`samples` is 0"), ({"epochs": 0}, "`epochs` is 0"), ({"global_batch": 0}, "`global_batch` is 0"),
                              ({"name": "a b"}, "the name of data"), ({"name": "a\0b"}, "NUL"), ({"share": 1}, "go together"), ({"share": 3, "shares": 3}, "`share` is 3"),
                              ({"shares": 0, "share": 0}, "at least 1"), ({"seed": -1}, "seed"), ({"samples": 1 << 70}, "samples"),
                              ({"global_batch": 2.5}, "no integer")):
            with self.subTest(options), self.assertRaisesRegex(gtrain.InvalidArgument, said):
                self.samples(**options)


class PageTest(unittest.TestCase):
    """docs/python.md: its whole programs run as they stand, with a model of their reader."""

    def programs(self):
        """Two, each in two parts: what it defines, and what it does. The second does other things with what the first defines."""
        with open(os.path.join(SOURCE, "docs", "python.md")) as page:
            blocks = re.findall(r"```python\n(.*?)```", page.read(), re.S)
        whole, = [block for block in blocks if "import numpy" in block]
        defines, does = whole[:whole.index("\ntry:")], whole[whole.index("\ntry:"):]
        lazy, = [block for block in blocks if "lazy=True" in block and "while step" in block]
        return [(defines, does), (defines, lazy)]

    def test_whole_programs_save_the_last_step_and_are_resumed_C4(self):
        for defines, program in self.programs():
            for steps, patient in ((1000, True), (1000, False), (77, False)):  # due at the last step, perhaps skipped, not due
                with tempfile.TemporaryDirectory() as folder:
                    self.run_program(defines, program.replace("step < 1000", f"step < {steps}"), folder, steps, patient)

    def run_program(self, defines, program, folder, steps, patient):
        # A step takes no time here: without patience a save is mostly still being written when the next one is due.
        model = ("\nGLOBAL_BATCH = 1\n"
                 "def my_gradient(weights, step, rank, size):\n"
                 f"    if {patient} and step % 50 == 49: checkpointer.wait()\n"
                 "    assert weights[0] == -step, (weights[0], step)\n    return weights * 0 + 10.0, 1\n")
        end = "\nprint('ended at', step)\n"
        result = subprocess.run([sys.executable, "-c", defines + model + program + end], cwd=folder, text=True, capture_output=True,
                                env=dict(os.environ, PYTHONPATH=HERE), timeout=120)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(f"ended at {steps}", result.stdout)
        weights = np.zeros(20)
        with gtrain.Session() as session, gtrain.Checkpointer(session, uri=os.path.join(folder, "ckpt")) as checkpointer:
            checkpointer.replicated(weights=weights)
            self.assertEqual(checkpointer.restore(), steps, program)
        self.assertTrue((weights == -steps).all())


class ExampleTest(unittest.TestCase):
    def test_python_sgd_by_hand_and_resumed(self):
        script = os.path.join(SOURCE, "examples", "python_sgd", "train.py")
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, script, "--checkpoint", os.path.join(folder, "ckpt")]
            first = subprocess.run([*command, "--steps", "60"], text=True, capture_output=True, timeout=60)
            self.assertEqual(first.returncode, 0, first.stderr)
            self.assertIn("step 50 loss", first.stdout)
            second = subprocess.run([*command, "--steps", "200"], text=True, capture_output=True, timeout=60)
            self.assertEqual(second.returncode, 0, second.stderr)
            self.assertIn("resumed at step 60", second.stdout)
            accuracy = re.search(r"accuracy ([0-9.]+) on 1 rank", second.stdout)
            self.assertGreater(float(accuracy.group(1)), 0.9)


if __name__ == "__main__":
    unittest.main()
