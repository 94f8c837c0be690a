//! A collective over typed values that is ready to run: on the caller's buffer, or on one of its own beside the
//! caller.

use std::sync::Arc;

use farflung_base::{Bytes, Pending, Rank};

use super::{Communicator, check_word};
use crate::CommError;
use crate::element::{Element, ReduceOp};
use crate::interpret::Interpreter;
use crate::plain::Plain;
use crate::plans::{Kind, Plan};
use crate::reduction::Reduction;

/// Its steps, and what all ranks compare.
pub(super) struct Call<T> {
    pub(super) name: &'static str,
    pub(super) plan: Plan,
    pub(super) op: Reduction<T>,
    /// What all ranks have in common of the buffers' lengths.
    pub(super) len: usize,
}

impl<T: Element> Call<T> {
    /// Of a collective that only moves values.
    pub(super) fn moving(name: &'static str, plan: impl Into<Plan>, len: usize) -> Self {
        Self { name, plan: plan.into(), op: ReduceOp::Sum.into(), len }
    }
}

impl Communicator {
    fn interpreter<T: Element, S: AsRef<[T]> + AsMut<[T]> + Send>(
        &self,
        call: Call<T>,
        data: S,
    ) -> Result<Interpreter<Plain<T, S>>, CommError> {
        let Call { name, plan, op, len } = call;
        op.is_defined(name)?;
        let Plan { program, algorithm, passing } = plan;
        let mut facts = vec![T::CODE];
        facts.extend(op.facts());
        facts.extend(((program.lanes.len() as u64) << 32 | program.blocks as u64).to_le_bytes());
        if T::WIDTH != 1 {
            facts.extend((T::WIDTH as u64).to_le_bytes());
        }
        let check = check_word(name, len, &facts);
        let tag = self.next_tags(program.lanes.len())?;
        let plain = Plain::new(&program, passing, data, op);
        let members = Arc::clone(&self.group.members);
        Ok(Interpreter::new(name, program, algorithm, plain, (tag, check), members))
    }

    /// Runs it on this thread. A buffer on which it failed is invalid.
    pub(super) fn in_place<T: Element>(&self, call: Call<T>, data: &mut [T]) -> Result<(), CommError> {
        let (name, bytes, rank) = (call.name, size_of_val(data), self.group.me);
        tracing::debug!(op = name, bytes, rank, "started");
        let body = self.interpreter(call, &mut *data)?;
        let result = self.run(name, body, true).map(|_| ());
        if result.is_err() {
            data.fill(T::INVALID);
        }
        result
    }

    /// Starts it, unless it could not be prepared.
    pub(super) fn owned<T: Element>(
        &self,
        call: Result<Call<T>, CommError>,
        data: Vec<T>,
    ) -> Pending<Result<Vec<T>, CommError>> {
        let body = call.and_then(|call| {
            let (name, bytes, rank) = (call.name, size_of_val(&data[..]), self.group.me);
            tracing::debug!(op = name, bytes, rank, "started");
            Ok((name, self.interpreter::<T, Vec<T>>(call, data)?))
        });
        match body {
            Ok((name, body)) => self.start(name, body, true),
            Err(e) => Pending::ready(Err(e)),
        }
    }

    /// The steps of a collective over `len` elements.
    pub(super) fn plan<T>(&self, kind: Kind, len: usize) -> Plan {
        self.plans.plan(kind, len, Bytes((size_of::<T>() * len) as u64))
    }

    /// Whether there is such a rank.
    pub(super) fn root(&self, op: &'static str, root: Rank) -> Result<(), CommError> {
        self.member(op, root).map(|_| ())
    }

    /// One count for each rank, which add up to `len`.
    pub(super) fn counts(&self, op: &'static str, counts: &[usize], len: usize) -> Result<(), CommError> {
        if counts.len() != self.size() {
            let (got, want) = (counts.len(), self.size());
            return Err(CommError::Argument { op, what: "number of counts", got, want });
        }
        match counts.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count)) {
            Some(sum) if sum == len => Ok(()),
            sum => {
                let got = sum.unwrap_or(usize::MAX);
                Err(CommError::Argument { op, what: "sum of the counts", got, want: len })
            }
        }
    }
}
