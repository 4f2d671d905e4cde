"""``python -m tests.core.replication.fake_agent agent JOB_ROOT``: the agent, with a manager that only plays one.

It speaks the orders over the real socket. The step of an `Await` says how it behaves; see `FakeManager`.
"""

import os
import sys
import time

import zmq

import flashpoint
from flashpoint import cli
from flashpoint.replication import agent, orders
from flashpoint.replication.agent_folder import AgentFolder, Assignment
from flashpoint.replication.keys import read_keys

COMMAND = ("-m", "tests.core.replication.fake_agent", "agent")
NEVER, FAIL, LATE, DIE, GARBLED, WRONG_NUMBER, HANG, BURST = range(8)
LATE_S = 0.4


class FakeManager:
    """Answers orders; replicates nothing."""

    def __init__(self, job_root, *, config, host="", port=0, bulk_port=0):
        self.released = self.stopping = False
        self.config = config
        self.folder = AgentFolder(job_root)
        read_keys(self.folder.path)
        self.membership = None
        if found := self.folder.read_assignment():
            self.membership = found.membership
        self.where = (host or "127.0.0.1", port or 7001, bulk_port or 7002)
        self.folder.write_ports(*self.where)
        self.last_s = time.monotonic()
        self.late = []
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(f"ipc://{self.folder.orders_path}")

    @property
    def idle_s(self):
        return time.monotonic() - self.last_s

    def run(self):
        while not self.stopping and not self.released:
            if self.socket.poll(20):
                self.last_s = time.monotonic()
                peer, data = self.socket.recv_multipart()
                self.obey(peer, orders.decode_order(data))
            due = [late for late in self.late if time.monotonic() >= late[0]]
            for late in due:
                self.late.remove(late)
                self.answer(late[1], orders.Done(late[2]))
        self.socket.close(linger=1000)
        self.context.term()
        self.folder.close()

    def stop(self):
        self.stopping = True

    def answer(self, peer, answer):
        self.socket.send_multipart([peer, orders.encode(answer)])

    def obey(self, peer, order):
        number = order.number
        if isinstance(order, orders.Await):
            self.wait(peer, order)
        elif isinstance(order, orders.Identify | orders.Configure):
            if isinstance(order, orders.Configure):
                self.membership = order.membership
                assignment = Assignment(
                    membership=order.membership, index=order.index, keep=order.keep, encrypt=order.encrypt
                )
                self.folder.write_assignment(assignment)
            job, epoch = (self.membership.job, self.membership.epoch) if self.membership else ("", 0)
            version = flashpoint.__version__
            self.answer(peer, orders.Identity(number, os.getpid(), version, job, epoch, *self.where))
        elif isinstance(order, orders.Inquire):
            self.answer(peer, orders.Report(number, (), {1: "open"}))
        elif isinstance(order, orders.Retrieve):
            self.answer(peer, orders.Done(number, len(order.objects)))
        else:
            self.answer(peer, orders.Done(number))
            self.released |= isinstance(order, orders.Release)

    def wait(self, peer, order):
        if order.step == FAIL:
            self.answer(peer, orders.Failed(order.number, "given up for a newer one", "superseded"))
        elif order.step == LATE:
            self.late.append((time.monotonic() + LATE_S, peer, order.number))
        elif order.step == DIE:
            os._exit(1)
        elif order.step == GARBLED:
            self.socket.send_multipart([peer, b"garbage"])
        elif order.step == WRONG_NUMBER:
            self.answer(peer, orders.Done(order.number + 1000))
            self.answer(peer, orders.Done(order.number))
        elif order.step == HANG:
            time.sleep(1000)
        elif order.step >= BURST:
            self.answer(peer, orders.Done(order.number, order.step))


if __name__ == "__main__":
    agent._replication_manager = FakeManager
    agent.STOP_S = float(os.environ.get("FAKE_STOP_S", agent.STOP_S))
    sys.exit(cli.main())
