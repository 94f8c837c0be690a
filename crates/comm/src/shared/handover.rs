//! Passes a memory segment and the two wakers (eventfds) from one process to another over a unix socket. The
//! socket has an abstract, unguessable name and leaves no file. Nothing here blocks: each side reads only after
//! the other has announced, over their existing connection, that it has sent something.

use std::fmt::Write as _;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use ring::rand::{SecureRandom, SystemRandom};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg, sockopt,
};

use super::map::Segment;
use super::ring_waker::RingWaker;

/// Length in bytes of a name, and of a token.
pub(crate) const KEY: usize = 16;

/// Number of connections without the token that are rejected before the offer fails.
const MAX_REJECTED: usize = 64;

fn unfit(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn address(name: &[u8; KEY]) -> io::Result<SocketAddr> {
    let text = name.iter().fold("farflung-".to_owned(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string cannot fail");
        text
    });
    SocketAddr::from_abstract_name(text)
}

/// Returns whether the other side is a process of this user.
fn is_own(stream: &UnixStream) -> bool {
    sockopt::socket_peercred(stream).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// A socket at which one peer can hand over a segment. Dropping it removes its name.
#[derive(Debug)]
pub(crate) struct Offer {
    listener: UnixListener,
    pub(crate) name: [u8; KEY],
    pub(crate) token: [u8; KEY],
}

impl Offer {
    pub(crate) fn new() -> io::Result<Self> {
        let mut keys = [[0; KEY]; 2];
        let random = SystemRandom::new();
        for key in &mut keys {
            random.fill(key).map_err(|_| io::Error::other("the system's random number generator failed"))?;
        }
        let [name, token] = keys;
        let listener = UnixListener::bind_addr(&address(&name)?)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, name, token })
    }

    /// Returns what the peer handed over: the segment, the peer's waker (eventfd), and the stream over which to
    /// send this side's waker.
    ///
    /// # Errors
    /// If nothing has arrived, the segment or waker is invalid, or [`MAX_REJECTED`] connections did not send
    /// the token.
    pub(crate) fn accept(&self) -> io::Result<(UnixStream, Segment, RingWaker)> {
        for _ in 0..MAX_REJECTED {
            let (stream, _) = self.listener.accept()?;
            stream.set_nonblocking(true)?;
            let mut said = [0; KEY];
            // A connection without the token is not from the peer.
            let Ok([Some(file), Some(bell)]) = receive(&stream, &mut said) else { continue };
            if is_own(&stream) && said == self.token {
                return Ok((stream, Segment::of_peer(file.as_fd())?, RingWaker::of_peer(bell)?));
            }
        }
        Err(unfit("too many connections to the socket without the token"))
    }
}

/// Creates a segment and hands it over to the process that made the offer.
///
/// # Errors
/// If no process of this user on this machine listens at the name, or there is not enough memory.
pub(crate) fn hand_over(
    name: &[u8; KEY],
    token: &[u8; KEY],
    bell: &RingWaker,
) -> io::Result<(UnixStream, Segment)> {
    let stream = UnixStream::connect_addr(&address(name)?)?;
    stream.set_nonblocking(true)?;
    if !is_own(&stream) {
        return Err(unfit("the socket belongs to another user"));
    }
    let (segment, file) = Segment::new()?;
    send(&stream, token, &[file.as_fd(), bell.as_fd()])?;
    Ok((stream, segment))
}

/// Sends this side's waker (eventfd) to the process that handed over the segment.
pub(crate) fn send_waker(stream: &UnixStream, bell: &RingWaker) -> io::Result<()> {
    send(stream, &[0; KEY], &[bell.as_fd()])
}

/// Receives the waker (eventfd) of the process that got the segment.
pub(crate) fn receive_waker(stream: &UnixStream) -> io::Result<RingWaker> {
    match receive(stream, &mut [0; KEY])? {
        [Some(bell), None] => RingWaker::of_peer(bell),
        _ => Err(unfit("expected exactly one event descriptor")),
    }
}

fn send(stream: &UnixStream, bytes: &[u8; KEY], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(unfit("the descriptors do not fit in a message"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags)? {
        KEY => Ok(()),
        _ => Err(unfit("a message that was cut short")),
    }
}

/// Receives one message and the descriptors sent with it.
fn receive(stream: &UnixStream, bytes: &mut [u8; KEY]) -> io::Result<[Option<OwnedFd>; 2]> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    let mut fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let mut fds = fds.next().into_iter().flatten();
    let pair = [fds.next(), fds.next()];
    if got.bytes == KEY { Ok(pair) } else { Err(unfit("a message that was cut short")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_and_both_doorbells_change_hands() {
        let offer = Offer::new().unwrap();
        assert!(offer.accept().is_err());
        let (maker, guest) = (RingWaker::new().unwrap(), RingWaker::new().unwrap());
        // Other processes connect first: one sends nothing, one a wrong token.
        let silent = UnixStream::connect_addr(&address(&offer.name).unwrap()).unwrap();
        let _wrong = hand_over(&offer.name, &[0; KEY], &maker).unwrap();
        let (theirs, _segment) = hand_over(&offer.name, &offer.token, &maker).unwrap();
        let (stream, ..) = offer.accept().unwrap();
        drop(silent);
        assert!(receive_waker(&theirs).is_err());
        send_waker(&stream, &guest).unwrap();
        receive_waker(&theirs).unwrap().ring();
        let mut count = [0; 8];
        rustix::io::read(&guest, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
        // Dropping the offer removes its name.
        let name = offer.name;
        drop(offer);
        assert!(hand_over(&name, &[0; KEY], &maker).is_err());
    }
}
