//! Connections that have not said yet who they are: how many wait, for how long, and what they say. It depends
//! on no job.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::WireError;
use crate::control::{Control, HELLO};
use crate::memory::real_start;
use crate::wire::{self, Message, Parsed};

/// Connections that wait at a time. Of more, the oldest go: a rank that is turned away so tries again.
const MOST: usize = 256;
/// Of these from one address, behind which there may be several ranks.
const MOST_OF_ONE: usize = 64;
/// For a greeting, which a rank sends at once.
const GREETING: Duration = Duration::from_secs(10);

/// A connection that has not greeted yet.
struct Waiting {
    stream: TcpStream,
    from: Option<IpAddr>,
    since: Instant,
    bytes: Vec<u8>,
}

/// What a connection said.
pub(super) enum Said {
    /// A greeting, whole.
    Hello(Vec<u8>),
    /// That it speaks another version.
    Other(u8),
}

/// The connections that wait, oldest first.
pub(super) struct Door(Vec<Waiting>);

enum Heard {
    Nothing,
    Nonsense,
    Said(Said),
}

impl Door {
    pub(super) const fn new() -> Self {
        Self(Vec::new())
    }

    /// Lets connections in from a listener that does not block, and gives those that said something. Each is
    /// heard at least once before it has to make room.
    pub(super) fn listen(&mut self, listener: &TcpListener) -> Vec<(TcpStream, Said)> {
        for _ in 0..MOST {
            let Ok((stream, address)) = listener.accept() else { break };
            if stream.set_nonblocking(true).is_ok() {
                let (from, since) = (Some(address.ip()), real_start());
                self.0.push(Waiting { stream, from, since, bytes: Vec::new() });
            }
        }
        let mut said = Vec::new();
        let mut still = Vec::new();
        for mut waiting in self.0.drain(..) {
            match hear(&mut waiting.stream, &mut waiting.bytes) {
                Heard::Nothing => still.push(waiting),
                Heard::Nonsense => {}
                Heard::Said(what) => said.push((waiting.stream, what)),
            }
        }
        self.0 = still;
        self.make_room();
        said
    }

    fn make_room(&mut self) {
        self.0.retain(|waiting| waiting.since.elapsed() < GREETING);
        let mut of_address: BTreeMap<Option<IpAddr>, usize> = BTreeMap::new();
        for waiting in &self.0 {
            *of_address.entry(waiting.from).or_default() += 1;
        }
        self.0.retain(|waiting| {
            let count = of_address.get_mut(&waiting.from).expect("each was counted");
            let stays = *count <= MOST_OF_ONE;
            *count -= usize::from(!stays);
            stays
        });
        let excess = self.0.len().saturating_sub(MOST);
        self.0.drain(..excess);
    }
}

/// Reads on in a greeting without blocking, and not a byte further: what follows belongs to the link.
fn hear(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> Heard {
    let mut buffer = [0; 512];
    loop {
        let want = match wire::parse(bytes) {
            Ok(Parsed::Part(want)) if want <= HELLO => want,
            Ok(Parsed::Whole(Message::Control(Control::Hello { .. }), _)) => {
                return Heard::Said(Said::Hello(std::mem::take(bytes)));
            }
            Err(WireError::Version { got, .. }) => return Heard::Said(Said::Other(got)),
            _ => return Heard::Nonsense,
        };
        match stream.read(&mut buffer[..(want - bytes.len()).min(512)]) {
            Ok(0) => return Heard::Nonsense,
            Ok(n) => bytes.extend_from_slice(&buffer[..n]),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Heard::Nothing,
            Err(_) => return Heard::Nonsense,
        }
    }
}
