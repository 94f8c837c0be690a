//! Memory shared by two processes of one host: a sealed, unnamed file with a ring buffer in each direction, and
//! its handover. Independent of frames, links and collectives.
//!
//! Both processes must belong to the same user, which is checked. False positions, slots or lengths from a peer
//! are errors. A peer that writes into a slot after handing it over can change the values in it, but cannot
//! cause anything else.

mod ring_waker;
mod handover;
mod map;
mod ring;

pub(crate) use handover::{Offer, hand_over, receive_waker, send_waker};
pub use map::SEGMENT_BYTES;
pub(crate) use map::{Direction, Segment};
pub(crate) use ring::{Consumer, Producer, Slot};
pub(crate) use ring_waker::RingWaker;
