"""A real S3 server for tests: Ceph's gateway over one monitor and one object daemon that keeps objects in memory.

All of it on loopback, in one folder, gone afterwards. About 15 s to start. Threads, index shards and log levels are those of a
small machine: with the defaults a save costs it half as much again (docs/performance.md).
"""
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid

PROGRAMS = ('ceph', 'ceph-authtool', 'ceph-mon', 'ceph-osd', 'monmaptool', 'radosgw', 'radosgw-admin')
EMPTY_SHA256 = 'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'

CONF = '''
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon}
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {folder}/admin.keyring
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
pid file = {folder}/$name.pid
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 2
osd pool default pgp num = 2
mon allow pool size one = true
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 2147483648
public network = 127.0.0.0/8
debug default = 0/0
debug ms = 0/0
debug auth = 0/0
debug objclass = 0/0
debug rados = 0/0
debug objecter = 0/0
debug monc = 0/0
debug mon = 0/0
debug osd = 0/0
debug rgw = 0/0
ms async op threads = 1
osd op num shards = 1
osd op num threads per shard = 1
rgw thread pool size = 4
rgw override bucket index max shards = 1
[mon]
mon data = {folder}/mon
keyring = {folder}/mon.keyring
[osd]
osd data = {folder}/osd
keyring = {folder}/osd/keyring
'''


def missing():
    return [program for program in PROGRAMS if not shutil.which(program)]


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


class Rgw:
    """start() returns once a bucket `bucket` exists; env holds what a user would set to reach it."""

    def __init__(self, folder):
        self.folder = folder
        self.daemons = []
        mon, self.port, self.tls_port = free_port(), free_port(), free_port()
        self.fsid, self.mon = str(uuid.uuid4()), mon
        self.env = {'AWS_ACCESS_KEY_ID': 'gtrain', 'AWS_SECRET_ACCESS_KEY': 'gtrain-secret',
                    'AWS_ENDPOINT_URL': f'http://127.0.0.1:{self.port}'}
        self.tls_env = dict(self.env, AWS_ENDPOINT_URL=f'https://127.0.0.1:{self.tls_port}', AWS_CA_BUNDLE=f'{folder}/tls.pem')

    def run(self, *argv, timeout=120):
        done = subprocess.run([argv[0], '-c', f'{self.folder}/ceph.conf', *argv[1:]] if 'keyring' not in argv[1]
                              else list(argv), cwd=self.folder, capture_output=True, text=True, timeout=timeout)
        if done.returncode != 0:
            raise RuntimeError(f'{" ".join(argv)}: {done.stdout}{done.stderr}')
        return done.stdout

    def daemon(self, name, *argv):
        with open(f'{self.folder}/{name}.out', 'w') as out:
            self.daemons.append(subprocess.Popen([argv[0], '-c', f'{self.folder}/ceph.conf', *argv[1:], '-f'],
                                                 cwd=self.folder, stdout=out, stderr=out, start_new_session=True))

    def start(self):
        with open(f'{self.folder}/ceph.conf', 'w') as conf:
            conf.write(CONF.format(fsid=self.fsid, mon=self.mon, folder=self.folder))
        self.run('ceph-authtool', 'mon.keyring', '--create-keyring', '--gen-key', '-n', 'mon.', '--cap', 'mon', 'allow *')
        self.run('ceph-authtool', 'admin.keyring', '--create-keyring', '--gen-key', '-n', 'client.admin',
                 '--cap', 'mon', 'allow *', '--cap', 'osd', 'allow *', '--cap', 'mgr', 'allow *')
        self.run('ceph-authtool', 'mon.keyring', '--import-keyring', 'admin.keyring')
        self.run('monmaptool', '--create', '--addv', 'a', f'[v2:127.0.0.1:{self.mon}]', '--fsid', self.fsid, 'monmap')
        self.run('ceph-mon', '--mkfs', '-i', 'a', '--monmap', 'monmap', '--keyring', 'mon.keyring')
        self.daemon('mon', 'ceph-mon', '-i', 'a')
        os.mkdir(f'{self.folder}/osd')
        osd = str(uuid.uuid4())
        self.run('ceph', 'osd', 'new', osd)
        self.run('ceph', 'auth', 'get-or-create', 'osd.0', 'mon', 'allow profile osd', 'osd', 'allow *', '-o', 'osd/keyring')
        self.run('ceph-osd', '-i', '0', '--mkfs', '--osd-uuid', osd)
        self.daemon('osd', 'ceph-osd', '-i', '0')
        self.run('radosgw-admin', 'user', 'create', '--uid', 'gtrain', '--display-name', 'gtrain', '--access-key',
                 self.env['AWS_ACCESS_KEY_ID'], '--secret', self.env['AWS_SECRET_ACCESS_KEY'])
        subprocess.run(['openssl', 'req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes', '-days', '2',
                        '-subj', '/CN=gtrain tests', '-addext', 'subjectAltName=IP:127.0.0.1', '-keyout', 'tls.key', '-out', 'tls.pem'],
                       cwd=self.folder, check=True, capture_output=True, timeout=60)
        self.daemon('rgw', 'radosgw', '-n', 'client.admin', '--rgw-frontends',
                    f'beast endpoint=127.0.0.1:{self.port} ssl_endpoint=127.0.0.1:{self.tls_port} '
                    f'ssl_certificate={self.folder}/tls.pem ssl_private_key={self.folder}/tls.key')
        deadline = time.monotonic() + 120
        while self.make_bucket() != '200':
            if time.monotonic() > deadline:
                raise RuntimeError(f'the gateway does not answer; see {self.folder}/rgw.out')
            time.sleep(0.2)
        return self

    def make_bucket(self):
        user = f'{self.env["AWS_ACCESS_KEY_ID"]}:{self.env["AWS_SECRET_ACCESS_KEY"]}'
        return subprocess.run(['curl', '-s', '-o', '/dev/null', '-w', '%{http_code}', '--aws-sigv4', 'aws:amz:us-east-1:s3',
                               '-H', f'x-amz-content-sha256: {EMPTY_SHA256}', '--user', user, '-X', 'PUT',
                               f'{self.env["AWS_ENDPOINT_URL"]}/bucket'], capture_output=True, text=True).stdout

    def stop(self):
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()


def main(folder):
    """For bench_checkpoint_rgw: FOLDER/env appears when the bucket is there; runs until SIGTERM or the parent's end."""
    parent, server = os.pidfd_open(os.getppid()), Rgw(folder)  # readable when the parent has ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server.start()
        with open(f'{folder}/env.new', 'w') as env:
            env.writelines(f'{name}={value}\n' for name, value in server.env.items())
        os.rename(f'{folder}/env.new', f'{folder}/env')
        select.select([parent], [], [])
    finally:
        server.stop()


if __name__ == '__main__':
    main(sys.argv[1])
