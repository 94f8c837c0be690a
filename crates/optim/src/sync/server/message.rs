//! Messages between workers and servers: a byte for the kind, then numbers, little-endian.

/// What a worker asks for in a synchronisation of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sync) enum SyncRequest {
    /// The model.
    Model,
    /// The model and the states of the server's rule.
    All,
    /// The model after the last change of the run.
    End,
}

/// A worker's message.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::sync) enum ToServer {
    /// A change: 17 bytes, and 4 per value.
    Push { step: u64, weight: f64, change: Vec<f32> },
    /// A change through a codec: 17 bytes and the payload.
    Packed { step: u64, weight: f64, payload: Vec<u8> },
    /// Request to synchronise: the worker sends no change until all workers have synchronised.
    Synchronise { wants: SyncRequest },
}

/// A server's message.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::sync) enum FromServer {
    /// The model, which includes this number of the worker's changes: 9 bytes, and 4 per value.
    Moved { pushes: u64, model: Vec<f32> },
    /// All workers have synchronised, after this number of changes: the model, and the states if asked for.
    Synchronised { pushes: u64, values: Vec<f32> },
    /// The worker's message was invalid.
    Refused,
}

const PUSH: u8 = 0;
const MEET: u8 = 1;
const PACKED: u8 = 2;
const MOVED: u8 = 0;
const MET: u8 = 1;
const REFUSED: u8 = 2;

fn joined(kind: u8, numbers: &[[u8; 8]], values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1 + 8 * numbers.len() + 4 * values.len());
    bytes.push(kind);
    bytes.extend(numbers.as_flattened());
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    bytes
}

fn values(bytes: &[u8]) -> Option<Vec<f32>> {
    let (values, rest) = bytes.as_chunks::<4>();
    rest.is_empty().then(|| values.iter().map(|&value| f32::from_le_bytes(value)).collect())
}

impl ToServer {
    pub(in crate::sync) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Push { step, weight, change } => {
                joined(PUSH, &[step.to_le_bytes(), weight.to_le_bytes()], change)
            }
            Self::Packed { step, weight, payload } => {
                let mut bytes = joined(PACKED, &[step.to_le_bytes(), weight.to_le_bytes()], &[]);
                bytes.extend(payload);
                bytes
            }
            Self::Synchronise { wants } => {
                let wants = match wants {
                    SyncRequest::Model => 0,
                    SyncRequest::All => 1,
                    SyncRequest::End => 2,
                };
                vec![MEET, wants]
            }
        }
    }

    /// Decodes a message to a server of `len` values; `None` if it is invalid. A payload is left for the caller
    /// to decode.
    pub(in crate::sync) fn from_bytes(bytes: &[u8], len: usize) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        match kind {
            PUSH | PACKED => {
                let (&step, rest) = rest.split_first_chunk::<8>()?;
                let (&weight, rest) = rest.split_first_chunk::<8>()?;
                let step = u64::from_le_bytes(step);
                let weight = Some(f64::from_le_bytes(weight)).filter(|w| w.is_finite() && *w >= 0.0)?;
                if kind == PACKED {
                    return Some(Self::Packed { step, weight, payload: rest.to_vec() });
                }
                let change = values(rest).filter(|change| change.len() == len)?;
                Some(Self::Push { step, weight, change })
            }
            MEET => match rest {
                [0] => Some(Self::Synchronise { wants: SyncRequest::Model }),
                [1] => Some(Self::Synchronise { wants: SyncRequest::All }),
                [2] => Some(Self::Synchronise { wants: SyncRequest::End }),
                _ => None,
            },
            _ => None,
        }
    }
}

impl FromServer {
    pub(in crate::sync) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Moved { pushes, model } => joined(MOVED, &[pushes.to_le_bytes()], model),
            Self::Synchronised { pushes, values } => joined(MET, &[pushes.to_le_bytes()], values),
            Self::Refused => vec![REFUSED],
        }
    }

    /// Decodes a message; `None` if it is invalid. The caller checks the number of values.
    pub(in crate::sync) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        if kind == REFUSED {
            return rest.is_empty().then_some(Self::Refused);
        }
        let (&pushes, rest) = rest.split_first_chunk::<8>()?;
        let (pushes, values) = (u64::from_le_bytes(pushes), values(rest)?);
        match kind {
            MOVED => Some(Self::Moved { pushes, model: values }),
            MET => Some(Self::Synchronised { pushes, values }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_read_back_and_others_are_refused() {
        let push = ToServer::Push { step: 7, weight: 0.5, change: vec![1.0, -2.0] };
        assert_eq!(push.to_bytes().len(), 17 + 8);
        assert_eq!(ToServer::from_bytes(&push.to_bytes(), 2), Some(push.clone()));
        assert_eq!(ToServer::from_bytes(&push.to_bytes(), 3), None);
        let packed = ToServer::Packed { step: 7, weight: 0.5, payload: vec![1, 2, 3] };
        assert_eq!(packed.to_bytes().len(), 17 + 3);
        assert_eq!(ToServer::from_bytes(&packed.to_bytes(), 2), Some(packed));
        for wants in [SyncRequest::Model, SyncRequest::All, SyncRequest::End] {
            let meet = ToServer::Synchronise { wants };
            assert_eq!(ToServer::from_bytes(&meet.to_bytes(), 2), Some(meet));
        }
        let moved = FromServer::Moved { pushes: 3, model: vec![0.25; 3] };
        assert_eq!(moved.to_bytes().len(), 9 + 12);
        let met = FromServer::Synchronised { pushes: 9, values: vec![] };
        for message in [moved, met, FromServer::Refused] {
            assert_eq!(FromServer::from_bytes(&message.to_bytes()), Some(message));
        }
        let all = push.to_bytes();
        for end in 0..all.len() {
            assert_eq!(ToServer::from_bytes(&all[..end], 2), None);
        }
        let wrong = ToServer::Push { step: 7, weight: f64::NAN, change: vec![1.0] };
        assert_eq!(ToServer::from_bytes(&wrong.to_bytes(), 1), None);
        for bytes in [&[][..], &[9], &[1], &[1, 7], &[0, 1, 2], &[2, 1, 2]] {
            assert_eq!((ToServer::from_bytes(bytes, 0), FromServer::from_bytes(bytes)), (None, None));
        }
    }
}
