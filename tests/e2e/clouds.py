"""The metadata services of machines in the clouds, each with the words of its cloud (docs/protocols/notices.md), and what others say
in their place: see HOSTILE."""
import http.server
import itertools
import json
import socket
import struct
import threading
import time


class Cloud:
    """The service of one machine: nothing is announced until `leave` is called. `hostile`: one of HOSTILE, which answers instead."""
    notice = None  # seconds from the notice to the end of the machine
    asked_for = None  # the path whose answer is the notice
    moment = None     # of its answer: the key that says when, if it says that

    def __init__(self):
        fake, self.going, self.hostile, self.answers, self.followed, self.counted = self, None, None, 0, 0, 0
        self.closed = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *words):
                pass

            def do_PUT(self):
                self.do_GET()

            def do_GET(self):
                try:
                    if self.path == ELSEWHERE:
                        fake.followed += 1
                        self.answer(*fake.genuine())
                    elif fake.hostile is not None:
                        fake.hostile(fake, self)
                        fake.answers += 1
                    else:
                        self.answer(*fake.reply(self))
                        fake.answers += 1
                except OSError:
                    fake.answers += 1  # whoever asked had enough of it

            def answer(self, status, text, headers=()):
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header('Content-Length', str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 64

            def handle_error(self, *words):
                pass

        self.server = Server(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self.server.server_port}'
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def forged(self, change):
        """What would be a notice, with another body."""
        status, text, headers = self.genuine()
        return status, change(text), headers

    @property
    def agent_flags(self):
        return '--notices', self.name, '--notices-url', self.url

    def leave(self, seconds=None):
        """The machine is announced to go in so many seconds."""
        self.counted += 1
        self.going = time.time() + (self.notice if seconds is None else seconds)

    def stay(self):
        self.going = None

    def genuine(self):
        """The reply that is a notice: status, body, headers."""
        self.counted += 1
        return self.told(time.time() + 20)

    def close(self):
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()


class Aws(Cloud):
    name, notice = 'aws', 120
    asked_for, moment = '/latest/meta-data/spot/instance-action', 'time'

    def reply(self, request):
        if request.command == 'PUT':
            return (200, 'the-token') if request.path == '/latest/api/token' else (404, '')
        if request.headers.get('X-aws-ec2-metadata-token') != 'the-token':
            return 401, ''
        if request.path == self.asked_for and self.going:
            return self.told(self.going)
        return 404, 'not found'

    def told(self, going):
        at = time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(going))
        return 200, json.dumps({'action': 'terminate', 'time': at}), [('Content-Type', 'text/plain')]


class Gcp(Cloud):
    """Made without --preemption-notice-duration: the word comes with the ACPI signal, 30 s before the end at best."""
    name, notice = 'gcp', 30
    asked_for = '/computeMetadata/v1/instance/preempted'
    google = [('Metadata-Flavor', 'Google'), ('Content-Type', 'application/text')]

    def reply(self, request):
        if request.headers.get('Metadata-Flavor') != 'Google':
            return 403, ''
        if request.path != self.asked_for:
            return 404, ''
        return self.told(self.going) if self.going else (200, 'FALSE', self.google)

    def told(self, going):
        return 200, 'TRUE', self.google


class Azure(Cloud):
    """An eviction of a spot machine."""
    name, notice = 'azure', 30
    asked_for, moment = '/metadata/scheduledevents?api-version=2020-07-01', 'NotBefore'

    def reply(self, request):
        if request.headers.get('Metadata') != 'true':
            return 400, ''
        if request.path.startswith('/metadata/instance/compute/name?'):
            return 200, 'the-machine'
        if request.path != self.asked_for:
            return 404, ''
        return self.told(self.going) if self.going else self.document([])

    def told(self, going):
        other = self.event('of-another', 'another-machine', time.time())
        return self.document([other, self.event(f'event-{self.counted}', 'the-machine', going)])

    def event(self, name, machine, going):
        started = going <= time.time()
        return {'EventId': name, 'EventType': 'Preempt', 'ResourceType': 'VirtualMachine', 'Resources': [machine],
                'EventStatus': 'Started' if started else 'Scheduled', 'EventSource': 'Platform', 'DurationInSeconds': -1,
                'NotBefore': '' if started else time.strftime('%a, %d %b %Y %H:%M:%S GMT', time.gmtime(going))}

    def document(self, events):
        return 200, json.dumps({'DocumentIncarnation': self.counted, 'Events': events}), [('Content-Type', 'application/json')]


CLOUDS = {cloud.name: cloud for cloud in (Aws, Gcp, Azure)}
ELSEWHERE = '/elsewhere'  # there each service says that the machine goes


# ---- what answers in the place of a cloud: functions of the cloud and of the request

def portal(cloud, request):
    request.answer(200, '<html><body>Please sign in to go on</body></html>', [('Content-Type', 'text/html')])


def portal_that_calls_itself_the_cloud(cloud, request):
    request.answer(200, '<html>' + cloud.genuine()[1] + '</html>', [('Content-Type', 'application/json'), ('Metadata-Flavor', 'Google')])


def leads_elsewhere(cloud, request):
    _, text, headers = cloud.genuine()
    request.answer(302, text, [*headers, ('Location', cloud.url + ELSEWHERE)])


def says_a_megabyte(cloud, request):
    request.answer(*cloud.forged(lambda text: ' ' * (1 << 20) + text))


def never_ends(cloud, request):
    request.send_response(200)
    request.end_headers()
    while not cloud.closed.is_set():
        request.wfile.write(b' ' * 65536)


def is_slow(cloud, request):
    """A byte now and then; the whole would be a notice."""
    _, text, headers = cloud.genuine()
    request.send_response(200)
    for name, value in [*headers, ('Content-Length', str(len(text)))]:
        request.send_header(name, value)
    request.end_headers()
    for letter in text:
        request.wfile.write(letter.encode())
        if cloud.closed.wait(0.6):
            return


def says_headers_for_ever(cloud, request):
    request.wfile.write(b'HTTP/1.1 200 OK\r\n')
    for number in itertools.count():
        request.wfile.write(f'X-Header-{number}: {"x" * 1000}\r\n'.encode())
        if cloud.closed.is_set():
            return


def says_nothing(cloud, request):
    request.connection.settimeout(60)
    request.connection.recv(1)  # until whoever asked goes


def hangs_up(cloud, request):
    pass


def breaks_off(cloud, request):
    """The whole notice, and it was to be longer."""
    _, text, headers = cloud.genuine()
    request.send_response(200)
    for name, value in [*headers, ('Content-Length', str(len(text) + 100))]:
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(text.encode())


def resets(cloud, request):
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    request.connection.close()


def is_no_http(cloud, request):
    request.wfile.write(bytes(range(256)) * 16)


def has_no_headers(cloud, request):
    """The protocol before 1.0."""
    request.wfile.write(cloud.genuine()[1].encode())


def fails_with_a_notice(cloud, request):
    _, text, headers = cloud.genuine()
    request.answer(500, text, headers)


def lets_nobody_in(cloud, request):
    """AWS asks for another token then, which it does not get either."""
    _, text, headers = cloud.genuine()
    request.answer(401, text, headers)


def says_the_half(cloud, request):
    request.answer(*cloud.forged(lambda text: text[:len(text) // 2]))


def says_it_twice(cloud, request):
    request.answer(*cloud.forged(lambda text: text + text))


def names_no_time(cloud, request):
    """Google names none; there it is a wrong word."""
    def wrong(text):
        if cloud.moment is None:
            return 'SOON'
        document = json.loads(text)
        for place in document.get('Events', [document]):
            place[cloud.moment] = 'Mon, 30 Feb 2026 25:61:00 GMT' if 'Events' in document else '2026-13-32T25:61:00Z'
        return json.dumps(document)
    request.answer(*cloud.forged(wrong))


def nests_deep(cloud, request):
    request.answer(200, '{"Events":' + '[' * 30000 + ']' * 30000 + '}', [('Metadata-Flavor', 'Google')])


HOSTILE = (portal, portal_that_calls_itself_the_cloud, leads_elsewhere, says_a_megabyte, never_ends, is_slow, says_headers_for_ever,
           says_nothing, hangs_up, breaks_off, resets, is_no_http, has_no_headers, fails_with_a_notice, lets_nobody_in, says_the_half,
           says_it_twice, names_no_time, nests_deep)
