//! A job whose processes come and go on one machine: a process that fails is started again, while the others
//! continue.

use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use super::job::{Failure, Job, LOST, POLL, USAGE, Whose};
use crate::{Error, LaunchError, NoticeArgs, Result, Stop, terminal};

/// Time before a process is started again, since the cause of the failure may last a while.
const PAUSE: Duration = Duration::from_secs(1);

/// Processes of a run whose number of members may vary, as with torchrun's `--nnodes=MIN:MAX`. Unlike with
/// torchrun, the remaining processes continue without a restart.
#[derive(Debug, Clone)]
pub struct Elastic {
    /// The job ends when fewer processes than this are running or still to be started again.
    pub least: usize,
    /// Number of processes that are started.
    pub most: usize,
    /// Number of restarts of failed processes, over all processes.
    pub restarts: u32,
    /// Time for which the other processes may continue after the run has ended for one of them, and time within
    /// which they must end when asked to.
    pub grace: Duration,
    /// How the processes are told that their machine is taken away. Once it is, none is started again.
    pub notice: Option<NoticeArgs>,
}

/// A process that is to be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// The process's number, below [`Elastic::most`]. Number 0 hosts the run.
    pub member: usize,
    /// The running members, through which it can join; empty if it hosts the run.
    pub running: Vec<usize>,
}

/// State of a member of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Member {
    /// The process is started after this time.
    Due(Duration),
    Runs,
    /// The process has ended, and is not started again.
    Gone,
}

/// A running job.
struct Running<'a> {
    elastic: &'a Elastic,
    job: Job,
    members: Vec<Member>,
    restarts: u32,
    failed: Vec<Failure>,
}

impl Elastic {
    /// Starts the processes and waits until the run has ended for all of them. `start` returns the command of
    /// each; `None` while the process cannot be started yet. Signals are passed on, as by
    /// [`Launch::run`](super::Launch::run).
    ///
    /// A process that succeeds ends the job. One that was started wrongly (exit code 2) is not started again.
    /// After the first start, the job ends if no process is running that others could join.
    ///
    /// Errors: [`LaunchError::Child`] with the last process that failed before the others were asked to end,
    /// with exit code 2 if it was started wrongly and else 75; [`Error::Stopped`] after a signal;
    /// [`LaunchError::Start`].
    pub fn run(&self, stop: &Stop, mut start: impl FnMut(&Start) -> Result<Option<Command>>) -> Result<()> {
        let members = vec![Member::Due(Duration::ZERO); self.most];
        let job = Job::default();
        let mut running =
            Running { elastic: self, job, members, restarts: self.restarts, failed: Vec::new() };
        let ended = running.watch(stop, &mut start);
        running.job.drain();
        ended
    }
}

impl Running<'_> {
    fn running(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|&member| self.members[member] == Member::Runs).collect()
    }

    /// Starts the members that are due and can be started. Once the job has begun, they must join a running
    /// member.
    fn start(
        &mut self,
        begun: bool,
        start: &mut impl FnMut(&Start) -> Result<Option<Command>>,
    ) -> Result<()> {
        for member in 0..self.members.len() {
            let Member::Due(after) = &mut self.members[member] else { continue };
            *after = after.saturating_sub(POLL);
            if !after.is_zero() {
                continue;
            }
            let running = self.running();
            if running.is_empty() && (begun || member > 0) {
                continue;
            }
            let Some(mut command) = start(&Start { member, running })? else { continue };
            command.stdin(Stdio::null());
            let started = self.job.start(command, Whose::Rank(member));
            started.map_err(|source| LaunchError::Start { rank: member, source })?;
            self.members[member] = Member::Runs;
        }
        Ok(())
    }

    /// Decides whether a failed member is started again, and tells the user.
    fn failed(&mut self, failure: Failure) {
        let Whose::Rank(member) = failure.whose else { return };
        let is_taken = self.elastic.notice.as_ref().is_some_and(NoticeArgs::is_given);
        let again = failure.code() != USAGE && self.restarts > 0 && !is_taken;
        self.members[member] = if again { Member::Due(PAUSE) } else { Member::Gone };
        let left = self.running().len();
        let what = if again {
            let nth = self.elastic.restarts - self.restarts + 1;
            self.restarts -= 1;
            format!("it is started again, restart {nth} of {}", self.elastic.restarts)
        } else {
            "it is not started again".to_owned()
        };
        terminal::write_stderr(format!(
            "member {member} failed ({}), {left} continue: {what}\n",
            failure.status
        ));
        self.failed.push(failure);
    }

    /// Returns why the job cannot continue, or `None` if it can.
    fn is_lost(&self) -> Option<String> {
        if self.running().is_empty() {
            return Some("no member is left that others could join: the job ends\n".to_owned());
        }
        let left = self.members.iter().filter(|member| **member != Member::Gone).count();
        let least = self.elastic.least;
        (left < least).then(|| format!("fewer than {least} members are left: the job ends\n"))
    }

    fn watch(
        &mut self,
        stop: &Stop,
        start: &mut impl FnMut(&Start) -> Result<Option<Command>>,
    ) -> Result<()> {
        let (mut forwarded, mut passed, mut begun) = (None, 0, false);
        // Time since the job began to end, counted in polls.
        let mut ending: Option<Duration> = None;
        loop {
            if ending.is_none() {
                self.start(begun, start)?;
                begun = true;
            }
            let mut ended = Vec::new();
            let alive = self.job.poll(&mut ended, ending.is_some())?;
            for failure in ended {
                if ending.is_none() { self.failed(failure) } else { self.failed.push(failure) }
            }
            if let Some(signal) = stop.take() {
                forwarded.get_or_insert(signal);
                passed += u32::from(!signal.is_warning());
                self.job.pass_signal(signal, passed);
                ending.get_or_insert(Duration::ZERO);
            }
            if ending.is_none() && self.job.succeeded() > 0 {
                ending = Some(Duration::ZERO);
            }
            if let Some(why) = self.is_lost().filter(|_| ending.is_none()) {
                terminal::write_stderr(why);
                self.job.ask_to_end();
                ending = Some(self.elastic.grace);
            }
            if let Some(waited) = &mut ending {
                if !alive {
                    return self.outcome(forwarded);
                }
                *waited += POLL;
                // Processes that were asked by a signal save first, however long that takes.
                if forwarded.is_none() {
                    if (self.elastic.grace..self.elastic.grace + POLL).contains(waited) {
                        self.job.ask_to_end();
                    } else if *waited >= self.elastic.grace * 2 {
                        self.job.kill();
                    }
                }
            }
            thread::sleep(POLL);
        }
    }

    fn outcome(&self, forwarded: Option<crate::Signal>) -> Result<()> {
        let by_itself = self.failed.iter().rfind(|failure| !failure.asked);
        match (self.job.succeeded(), forwarded, by_itself.or(self.failed.last())) {
            (1.., ..) | (_, None, None) => Ok(()),
            (_, Some(signal), _) => Err(Error::Stopped(signal)),
            (_, None, Some(failure)) => {
                let code = if failure.code() == USAGE { USAGE } else { LOST };
                Err(failure.error(code).into())
            }
        }
    }
}
