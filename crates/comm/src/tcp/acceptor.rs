//! Connections that have not greeted yet: how many may wait and for how long, what they may send, and the check
//! of their proof that they belong here. This module is independent of the job.
//!
//! A connection without proof costs at most: about `Session::limit` bytes read and one handshake if
//! connections are encrypted, a greeting of 1024 bytes if not; a time of [`GREETING`]; and one of
//! [`MOST_OF_ONE`] places of its address. Nothing here waits for such a connection, so it delays no other.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::large_packets;
use super::listeners::Listeners;
use super::stream::{Stream, session_error};
use crate::WireError;
use crate::control::{Control, HELLO};
use crate::error::Refusal;
use crate::memory::real_start;
use crate::secure::{Role, Security, SessionError};
use crate::wire::{self, Message, Parsed, VERSION};

/// Greatest number of waiting connections. If there are more, the oldest are closed; a rank whose connection is
/// closed so tries again.
const MOST: usize = 256;
/// Greatest number of waiting connections from one address, behind which there may be several ranks.
const MOST_OF_ONE: usize = 64;
/// Time in which a connection must greet; a rank greets at once.
const GREETING: Duration = Duration::from_secs(10);

/// A connection that has not greeted yet.
struct Waiting {
    stream: Stream,
    from: SocketAddr,
    since: Instant,
    bytes: Vec<u8>,
}

/// A connection that has proven that it belongs here, and the frame that it greeted with.
pub(super) struct AuthenticatedConnection {
    pub(super) stream: Stream,
    pub(super) greeting: Vec<u8>,
}

/// The waiting connections, oldest first.
pub(super) struct Acceptor {
    security: Security,
    waiting: Vec<Waiting>,
}

enum GreetingStatus {
    Nothing,
    /// The connection was refused, or has ended.
    End,
    Greeting(Vec<u8>),
}

impl Acceptor {
    pub(super) const fn new(security: Security) -> Self {
        Self { security, waiting: Vec::new() }
    }

    /// Waits until a connection arrives or sends something, for at most `limit` and at most a second.
    pub(super) fn wait(&self, listeners: &Listeners, limit: Duration) {
        let mut fds: Vec<PollFd<'_>> =
            self.waiting.iter().map(|waiting| PollFd::new(&waiting.stream.socket, PollFlags::IN)).collect();
        fds.extend(listeners.poll_fds());
        let limit = limit.min(Duration::from_secs(1));
        let limit = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: limit.subsec_nanos().into() };
        // If the poll is interrupted, the caller polls again.
        let _ = poll(&mut fds, Some(&limit));
    }

    /// Accepts connections, and returns those that have greeted. Each is read at least once before it may be
    /// closed to make room.
    pub(super) fn listen(&mut self, listeners: &Listeners) -> Vec<AuthenticatedConnection> {
        for _ in 0..MOST {
            let Some((socket, from)) = listeners.accept() else { break };
            let ready = socket.set_nonblocking(true).is_ok();
            if let (true, Ok(stream)) = (ready, Stream::new(socket, &self.security, Role::Server, None)) {
                self.waiting.push(Waiting { stream, from, since: real_start(), bytes: Vec::new() });
            }
        }
        let mut guests = Vec::new();
        let mut still = Vec::new();
        for mut waiting in std::mem::take(&mut self.waiting) {
            match self.read_greeting(&mut waiting) {
                GreetingStatus::Nothing => still.push(waiting),
                GreetingStatus::End => {}
                GreetingStatus::Greeting(greeting) => {
                    guests.push(AuthenticatedConnection { stream: waiting.stream, greeting });
                }
            }
        }
        self.waiting = still;
        self.make_room();
        guests
    }

    fn make_room(&mut self) {
        let refused = self.security.refused();
        self.waiting.retain(|waiting| {
            let stays = waiting.since.elapsed() < GREETING;
            if !stays {
                refused.note(Some(waiting.from), "silent", &format_args!("no greeting within {GREETING:?}"));
            }
            stays
        });
        let mut of_address: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for waiting in &self.waiting {
            *of_address.entry(waiting.from.ip()).or_default() += 1;
        }
        let mut all = self.waiting.len();
        self.waiting.retain(|waiting| {
            let count = of_address.get_mut(&waiting.from.ip()).expect("all addresses were counted above");
            let stays = *count <= MOST_OF_ONE && all <= MOST;
            if !stays {
                *count -= 1;
                all -= 1;
                let limits = format_args!(
                    "at most {MOST_OF_ONE} connections of one address and {MOST} in all may wait"
                );
                refused.note(Some(waiting.from), "too many", &limits);
            }
            stays
        });
    }

    /// Returns the addresses of the connections that have not greeted, the first with the likely cause, if
    /// there is one.
    pub(super) fn waiting(&self) -> Vec<String> {
        // Anyone may connect and never confirm what is sent, and asking for the cause takes time.
        let cause = self.waiting.first().and_then(|first| large_packets::lost(&first.stream.socket));
        let cause = cause.map(|cause| format!(" ({cause}: {})", large_packets::ADVICE));
        let causes = cause.into_iter().chain(std::iter::repeat(String::new()));
        self.waiting.iter().zip(causes).map(|(waiting, cause)| format!("{}{cause}", waiting.from)).collect()
    }

    /// Sends the reason to a connection that is refused.
    pub(super) fn refuse(&self, stream: &Stream, reason: Refusal) {
        self.security.refused().note(stream.address(), reason.kind(), &reason);
        // The connection may be gone already.
        let _ = stream.send_message(&Control::Refuse(reason));
    }

    /// Reads more of a greeting, but no byte after it: later bytes belong to the link.
    fn read_greeting(&self, Waiting { stream, from, bytes, .. }: &mut Waiting) -> GreetingStatus {
        let mut buffer = [0; 512];
        let note = |kind, detail: &dyn std::fmt::Display| {
            self.security.refused().note(Some(*from), kind, detail);
            GreetingStatus::End
        };
        loop {
            let want = match wire::parse(bytes) {
                Ok(Parsed::Part(want)) if want <= HELLO => want,
                Ok(Parsed::Whole(Message::Control(message), _)) => match message {
                    Control::Hello { .. } | Control::Open(_) | Control::Ask(_) if stream.is_proven() => {
                        return GreetingStatus::Greeting(std::mem::take(bytes));
                    }
                    proof @ Control::Prove { .. } if stream.is_encrypted() && !stream.is_proven() => {
                        if let Err(reason) = stream.admit(&proof) {
                            self.refuse(stream, reason);
                            return GreetingStatus::End;
                        }
                        bytes.clear();
                        continue;
                    }
                    _ => return note("no greeting", &"another message arrived before the greeting"),
                },
                Err(WireError::Version { got, .. }) => {
                    self.refuse(stream, Refusal::Version { want: VERSION, got });
                    return GreetingStatus::End;
                }
                Err(WireError::Magic) if bytes[..2] == [0x16, 3] => {
                    self.refuse(stream, Refusal::EncryptionMismatch);
                    return GreetingStatus::End;
                }
                Err(error) => return note("garbage", &error),
                Ok(_) => {
                    return note("no greeting", &"a frame that is not a greeting, or is too long for one");
                }
            };
            match stream.read_now(&mut buffer[..(want - bytes.len()).min(512)], &mut []) {
                Ok(0) if bytes.is_empty() => {
                    return note("silent", &"it closed the connection without sending anything");
                }
                Ok(0) => return note("gave up", &"it closed the connection within its greeting"),
                Ok(n) => bytes.extend_from_slice(&buffer[..n]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return GreetingStatus::Nothing,
                Err(e) => {
                    return match session_error(&e) {
                        Some(SessionError::NotEncrypted) => {
                            stream.send_unencrypted(&Control::Refuse(Refusal::EncryptionMismatch));
                            note(SessionError::NotEncrypted.kind(), &Refusal::EncryptionMismatch)
                        }
                        Some(error) => note(error.kind(), error),
                        None => note("gave up", &e),
                    };
                }
            }
        }
    }
}
