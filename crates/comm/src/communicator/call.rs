//! Prepared collectives over typed values: run in place on the caller's buffer, or in the background on a
//! buffer that the collective owns.

use std::sync::Arc;

use farflung_base::{Bytes, Pending, Rank};

use super::{Communicator, check_word};
use crate::CommError;
use crate::element::{Element, ReduceOp};
use crate::interpret::Interpreter;
use crate::native::NativeKind;
use crate::plain::Plain;
use crate::plans::{Kind, Plan};
use crate::reduction::Reduction;

/// A prepared collective: its program, and the properties that must be the same on all ranks.
pub(super) struct Call<T> {
    pub(super) name: &'static str,
    pub(super) plan: Plan,
    pub(super) op: Reduction<T>,
    /// Buffer length, which must be the same on all ranks; 0 if lengths may differ between ranks.
    pub(super) len: usize,
    /// The collective of a network's own library that does the same, if libraries have one.
    pub(super) native: Option<NativeKind>,
}

impl<T: Element> Call<T> {
    /// Creates the call of a collective that moves values and does not reduce.
    pub(super) fn moving(name: &'static str, plan: impl Into<Plan>, len: usize) -> Self {
        Self { name, plan: plan.into(), op: ReduceOp::Sum.into(), len, native: None }
    }

    /// Lets the network's own library run the call, if that was chosen.
    pub(super) fn or_by(self, native: NativeKind) -> Self {
        Self { native: Some(native), ..self }
    }
}

impl Communicator {
    fn interpreter<T: Element, S: AsRef<[T]> + AsMut<[T]> + Send>(
        &self,
        call: Call<T>,
        data: S,
    ) -> Result<Interpreter<Plain<T, S>>, CommError> {
        let Call { name, plan, op, len, native: _ } = call;
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

    /// Runs a collective on this thread. If it fails after its start, the buffer is filled with
    /// [`Element::INVALID`].
    pub(super) fn in_place<T: Element>(&self, call: Call<T>, data: &mut [T]) -> Result<(), CommError> {
        let (name, bytes, rank) = (call.name, size_of_val(data), self.group.me);
        tracing::debug!(op = name, bytes, rank, "started");
        let result = match self.native_call(&call, data.len()) {
            Some(native) => self.run(name, self.native(native, call.op, &mut *data)?, true).map(|_| ()),
            None => self.run(name, self.interpreter(call, &mut *data)?, true).map(|_| ()),
        };
        if result.is_err() {
            data.fill(T::INVALID);
        }
        result
    }

    /// Starts a collective in the background; if `call` is an error, the result is that error.
    pub(super) fn owned<T: Element>(
        &self,
        call: Result<Call<T>, CommError>,
        data: Vec<T>,
    ) -> Pending<Result<Vec<T>, CommError>> {
        let started = call.and_then(|call| {
            let (name, bytes, rank) = (call.name, size_of_val(&data[..]), self.group.me);
            tracing::debug!(op = name, bytes, rank, "started");
            Ok(match self.native_call(&call, data.len()) {
                Some(native) => self.start(name, self.native::<T, Vec<T>>(native, call.op, data)?, true),
                None => self.start(name, self.interpreter::<T, Vec<T>>(call, data)?, true),
            })
        });
        started.unwrap_or_else(|e| Pending::ready(Err(e)))
    }

    /// Returns this rank's program of a collective over `len` elements.
    pub(super) fn plan<T>(&self, kind: Kind, len: usize) -> Plan {
        self.plans.plan(kind, len, Bytes((size_of::<T>() * len) as u64))
    }

    /// Returns an error if the rank does not exist.
    pub(super) fn root(&self, op: &'static str, root: Rank) -> Result<(), CommError> {
        self.member(op, root).map(|_| ())
    }

    /// Returns an error unless there is one count per rank and they add up to `len`.
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
