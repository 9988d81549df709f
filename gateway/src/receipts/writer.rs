//! Writes a chain: one thread, one file at a time.
//!
//! A batch is appended whole or not at all: what a failed write has left is cut off before the next, and the chain stands
//! where it stood. What could not be written is a gap, which goes first as soon as something can be written again.
//!
//! A batch in which somebody waits for a receipt is made durable before anybody is answered; those who come meanwhile wait for
//! the next one. So one fsync serves all that have come in the time of the one before.
//!
//! The thread looks for work fifty times a second instead of being woken by each request: waking a thread costs more than
//! everything else that a request does here. Having slept, it would then be let run to the end by the kernel, a third of a
//! millisecond at 12,000 requests a second, while whoever answers requests waits for the core; so it gives way after each
//! handful, for as long as that costs it little. Only a request that waits for its receipt wakes it.

mod entries;

use super::batch::{Batch, Pseudonyms, received};
use super::before::Before;
use super::file::{Name, Standing, list, lock, standing};
use super::{ReceiptsConfig, Shared, Told, now_ms};
use gateway_core::receipt::chain::ChainHash;
use gateway_core::receipt::entry::{Entry, GapReason, Role, VERSION};
use gateway_core::residency::Residency;
use rand::Rng;
use regions::id::RegionId;
use regions::set::RegionSet;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Requests that are written at once: a few hundred KiB.
const BATCH_MAX: usize = 1024;
/// Requests between two offers of the core to others: some ten microseconds of hashing.
const HANDFUL: usize = 8;
/// For how long of a batch. On a core that others never leave idle each offer costs some milliseconds, in which as many
/// requests come as a batch holds; a writer that stayed so polite would lose receipts.
const GIVES_WAY: Duration = Duration::from_millis(5);
/// Between two looks for work.
const PAUSE: Duration = Duration::from_millis(20);
/// Between two tries at a disk that does not take what it is given.
const RETRY: Duration = Duration::from_millis(250);
/// How long a receipt may be in the machine's memory only.
const SYNC_PERIOD: Duration = Duration::from_secs(1);

/// The writer of a chain.
pub(super) struct Writer {
    dir: PathBuf,
    role: Role,
    place: RegionId,
    /// Prefix of the keys of this process's attempts.
    process: u64,
    /// By their index.
    regions: Vec<RegionId>,
    shared: Arc<Shared>,
    file_bytes: u64,
    chain: String,
    /// Held while this process writes the chain.
    _lock: File,
    /// The current file; none before the first, and after one that could not be made durable.
    file: Option<File>,
    number: u32,
    head: ChainHash,
    /// Bytes of the current file that are good.
    len: u64,
    /// There may be more than that.
    dirty: bool,
    /// Policies of the current file with their numbers.
    policies: HashMap<RegionSet, Vec<(Residency, u32)>>,
    pseudonyms: Pseudonyms,
    policies_known: usize,
    next_policy: u32,
    /// Receipts that are missing and since when.
    gaps: BTreeMap<GapReason, (u64, u64)>,
    /// Receipts that are written and may not be durable, and since when.
    unsynced: u64,
    unsynced_since: Option<Instant>,
    /// Numbers of receipts that are durable and whose outcome was not written.
    open: HashSet<u64>,
    /// Of the requests that were rejected, how many the chain tells of.
    rejected_written: u64,
}

impl Writer {
    /// Goes on with the newest chain of the folder that nobody holds, or begins one.
    pub(super) fn open(
        config: &ReceiptsConfig,
        role: Role,
        place: &RegionId,
        regions: Vec<RegionId>,
        process: u64,
        shared: Arc<Shared>,
    ) -> io::Result<Writer> {
        let ReceiptsConfig { dir, key, required: _, queue: _, file_bytes } = config;
        fs::create_dir_all(dir)?;
        let left = take_over(dir, role, place)?;
        let resumed = left.is_some();
        let (chain, held, stands) = match left {
            Some(left) => left,
            None => {
                // Begins with the time, so that the newest is the last by name.
                let chain = format!("{:012x}{:08x}", now_ms(), rand::rng().random::<u32>());
                let held = lock(dir, &chain)?.ok_or(io::ErrorKind::AlreadyExists)?;
                (chain, held, Standing::nowhere())
            }
        };
        let Standing { number, head, len, torn_bytes, clean, writer: _ } = stands;
        if torn_bytes > 0 {
            let torn = Name { chain: chain.clone(), number }.in_dir(dir);
            OpenOptions::new().write(true).open(torn)?.set_len(len)?;
        }
        let mut writer = Writer {
            dir: dir.clone(),
            role,
            place: place.clone(),
            process,
            regions,
            shared,
            file_bytes: *file_bytes,
            chain,
            _lock: held,
            file: None,
            // A file in which nothing is good is begun again.
            number: if len == 0 { number.saturating_sub(1) } else { number },
            head,
            len: 0,
            dirty: false,
            policies: HashMap::new(),
            pseudonyms: Pseudonyms::new(key.clone()),
            policies_known: 0,
            next_policy: 1,
            gaps: BTreeMap::new(),
            unsynced: 0,
            unsynced_since: None,
            open: HashSet::new(),
            rejected_written: 0,
        };
        writer.begin_file()?;
        if resumed {
            let mut batch = Batch::after(writer.head);
            batch.put(&Entry::Resumed { at_ms: now_ms(), clean, torn_bytes });
            writer.append(batch)?;
            tracing::info!(chain = writer.chain, clean, torn_bytes, "receipts go on");
        }
        writer.sync();
        Ok(writer)
    }

    pub(super) fn chain(&self) -> &str {
        &self.chain
    }

    /// Writes what it is told until it is told to close, or nobody can tell it anything any more.
    pub(super) fn run(mut self, mut queue: mpsc::Receiver<Told>) {
        let mut told = Vec::with_capacity(BATCH_MAX);
        while self.next(&mut queue, &mut told) {
            if told.iter().any(|told| matches!(told, Told::Close)) {
                queue.close();
                break;
            }
            let full = told.len() == BATCH_MAX;
            self.write(&mut told);
            if self.unsynced_since.is_some_and(|since| since.elapsed() >= SYNC_PERIOD) {
                self.sync();
            }
            if self.shared.failing() {
                std::thread::park_timeout(RETRY);
            } else if !full {
                std::thread::park_timeout(PAUSE);
            }
        }
        // What was handed in until now.
        while let Ok(one) = queue.try_recv() {
            told.push(one);
        }
        self.write(&mut told);
        self.close();
    }

    /// Takes what there is, and waits only if there is nothing else to do; false once nobody is left to tell anything.
    fn next(&self, queue: &mut mpsc::Receiver<Told>, told: &mut Vec<Told>) -> bool {
        if !self.has_something_to_tell() && self.unsynced_since.is_none() && !self.shared.failing() {
            return queue.blocking_recv_many(told, BATCH_MAX) > 0;
        }
        while told.len() < BATCH_MAX {
            match queue.try_recv() {
                Ok(one) => told.push(one),
                Err(mpsc::error::TryRecvError::Empty) => break,
                Err(mpsc::error::TryRecvError::Disconnected) => return !told.is_empty(),
            }
        }
        true
    }

    /// Something is missing, or was rejected, of which the chain does not tell yet.
    fn has_something_to_tell(&self) -> bool {
        !self.gaps.is_empty() || self.shared.rejected.get() > self.rejected_written
    }

    /// Writes what it was told, and before it what is missing. Requests that wait for a receipt are answered when all of it is
    /// durable.
    pub(super) fn write(&mut self, told: &mut Vec<Told>) {
        let overflowed = self.shared.overflowed.swap(0, Ordering::Acquire);
        if overflowed > 0 {
            let since = self.shared.overflowed_since_ms.swap(0, Ordering::Relaxed);
            self.miss(GapReason::QueueFull, overflowed, since);
        }
        if told.is_empty() && !self.has_something_to_tell() {
            return;
        }
        let receipts = told.iter().map(Told::receipts).sum();
        let written = self.try_write(told);
        let mut waiting = Vec::new();
        for told in told.drain(..) {
            if let Told::Before(before, answer) = told {
                waiting.push((before.number(), answer));
            }
        }
        let was_failing = self.shared.failing();
        match written {
            Ok(()) => {
                self.shared.written.add(receipts);
                self.unsynced += receipts;
                self.unsynced_since.get_or_insert_with(Instant::now);
                let durable = (waiting.is_empty() && !was_failing) || self.sync();
                if was_failing && durable {
                    self.shared.failing.store(false, Ordering::Relaxed);
                    tracing::info!(
                        chain = self.chain,
                        "receipts are written again; a gap says what is missing"
                    );
                }
                for (number, answer) in waiting {
                    if durable {
                        self.open.insert(number);
                    }
                    // It may have been given up meanwhile.
                    answer.send(durable).ok();
                }
            }
            Err(error) => {
                self.shared.failing.store(true, Ordering::Relaxed);
                for (_, answer) in waiting {
                    // It may have been given up meanwhile.
                    answer.send(false).ok();
                }
                self.shared.lost(GapReason::Disk).add(receipts);
                self.miss(GapReason::Disk, receipts, now_ms());
                // They may stand in what is cut off.
                self.forget_policies();
                if !was_failing {
                    tracing::error!(chain = self.chain, %error, "receipts cannot be written; they are counted as missing");
                }
            }
        }
    }

    fn miss(&mut self, why: GapReason, receipts: u64, since_ms: u64) {
        if receipts == 0 {
            return;
        }
        let since_ms = if since_ms == 0 { now_ms() } else { since_ms };
        let (missing, since) = self.gaps.entry(why).or_insert((0, since_ms));
        *missing += receipts;
        *since = (*since).min(since_ms);
    }

    fn try_write(&mut self, told: &[Told]) -> io::Result<()> {
        if self.file.is_none() || self.len >= self.file_bytes {
            self.begin_file()?;
        }
        let at_ms = now_ms();
        let mut batch = Batch::after(self.head);
        for (why, (missing, since_ms)) in self.gaps.iter().filter(|(_, (missing, _))| *missing > 0) {
            batch.put(&Entry::Gap { missing: *missing, reason: *why, since_ms: *since_ms, at_ms });
        }
        let rejected = self.shared.rejected.get();
        if rejected > self.rejected_written {
            let since_ms = match self.shared.rejected_since_ms.swap(0, Ordering::Relaxed) {
                0 => at_ms,
                since_ms => since_ms,
            };
            batch.put(&Entry::Rejected { requests: rejected - self.rejected_written, since_ms, at_ms });
        }
        let begun = Instant::now();
        // Nobody is given way to while somebody waits.
        let awaited = told.iter().any(|told| matches!(told, Told::Before(..)));
        for handful in told.chunks(HANDFUL) {
            for told in handful {
                match told {
                    Told::Sent(sent) => self.put_finished(sent, &mut batch),
                    Told::Received(over) => self.put_received(over, &mut batch),
                    Told::Before(before, _) => match &**before {
                        Before::Sending(sending) => self.put_sending(sending, &mut batch),
                        Before::Receiving(receiving) => batch.put(&received(&mut self.pseudonyms, receiving)),
                    },
                    Told::Close => {}
                }
            }
            if !awaited && begun.elapsed() < GIVES_WAY {
                std::thread::yield_now();
            }
        }
        self.append(batch)?;
        self.gaps.clear();
        self.rejected_written = rejected;
        Ok(())
    }

    /// Appends entries, all or none.
    fn append(&mut self, batch: Batch) -> io::Result<()> {
        let Batch { lines, head } = batch;
        let file = self.file.as_mut().expect("a file is begun before anything is appended");
        if self.dirty {
            file.set_len(self.len)?;
        }
        self.dirty = true;
        if let Err(error) = file.write_all(&lines) {
            // Cut off at once where that is possible, so that nobody reads lines that will not stay.
            self.dirty = file.set_len(self.len).is_err();
            return Err(error);
        }
        self.dirty = false;
        (self.head, self.len) = (head, self.len + lines.len() as u64);
        self.shared.bytes.add(lines.len() as u64);
        Ok(())
    }

    /// Begins the next file. The one before it is made durable first.
    fn begin_file(&mut self) -> io::Result<()> {
        if self.file.is_some() {
            self.sync();
        }
        let number = self.number + 1;
        let path = Name { chain: self.chain.clone(), number }.in_dir(&self.dir);
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        // It is there already if its first line could not be written the last time.
        file.set_len(0)?;
        let mut batch = Batch::after(self.head);
        let begins = Entry::File {
            version: VERSION,
            chain: Cow::Borrowed(&self.chain),
            role: self.role,
            region: Cow::Borrowed(self.place.as_str()),
            number,
            before: self.head.to_string().into(),
            at_ms: now_ms(),
        };
        batch.put(&begins);
        let Batch { lines, head } = batch;
        file.write_all(&lines)?;
        File::open(&self.dir)?.sync_all()?;
        (self.file, self.number, self.head) = (Some(file), number, head);
        (self.len, self.dirty) = (lines.len() as u64, false);
        self.unsynced_since.get_or_insert_with(Instant::now);
        self.forget_policies();
        self.next_policy = 1;
        Ok(())
    }

    fn forget_policies(&mut self) {
        self.policies.clear();
        self.policies_known = 0;
    }

    /// Makes what was written durable. After a failure nobody knows what of it is: the file is left, and they count as
    /// missing although they may be there. Whether everything is durable.
    fn sync(&mut self) -> bool {
        self.unsynced_since = None;
        let unsynced = std::mem::take(&mut self.unsynced);
        let Some(file) = &self.file else { return unsynced == 0 };
        self.shared.syncs.add(1);
        let synced = file.sync_data();
        if let Err(error) = &synced {
            tracing::error!(chain = self.chain, %error, unsynced, "receipts may not have reached the disk");
            self.file = None;
            self.shared.lost(GapReason::Unsynced).add(unsynced);
            self.shared.failing.store(true, Ordering::Relaxed);
            self.miss(GapReason::Unsynced, unsynced.max(1), now_ms());
        }
        synced.is_ok()
    }

    /// The end, if the disk lets it be told.
    pub(super) fn close(mut self) {
        self.write(&mut Vec::new());
        let mut batch = Batch::after(self.head);
        batch.put(&Entry::Closed { at_ms: now_ms() });
        if self.file.is_some() && self.append(batch).is_ok() {
            self.sync();
        }
    }
}

/// The newest chain of the folder that was written by such a process and that nobody holds, and where it stands.
fn take_over(
    dir: &std::path::Path,
    role: Role,
    place: &RegionId,
) -> io::Result<Option<(String, File, Standing)>> {
    let names = list(dir)?;
    let mut chains: Vec<_> = names.iter().map(|name| &name.chain).collect();
    chains.dedup();
    for chain in chains.into_iter().rev() {
        let Some(held) = lock(dir, chain)? else { continue };
        let files: Vec<_> = names.iter().filter(|name| name.chain == *chain).cloned().collect();
        let Some(stands) = standing(dir, &files)? else {
            tracing::error!(
                chain,
                "a chain of receipts is broken and is left as it is; another one is begun"
            );
            continue;
        };
        match &stands.writer {
            Some((theirs, there)) if *theirs == role && there == place.as_str() => {
                return Ok(Some((chain.clone(), held, stands)));
            }
            Some(_) | None => {}
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
