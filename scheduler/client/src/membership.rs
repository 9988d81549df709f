//! Task that keeps the identity folder of a process current: it renews the certificate at half of its life, and follows
//! the trusted authorities and the revoked certificates.
//!
//! The trusted state is a long poll, so a revocation arrives at once while a hub is reachable; the process applies it
//! from its folder, also after a restart without a hub. Without a hub the task tries again with backoff, and there is
//! half of a certificate's life until it expires.

use std::time::Duration;

use backoff::Backoff;
use scheduler_core::pki::issue;
use scheduler_core::pki::trust::TrustState;

use crate::authority::{AuthorityConnection, AuthorityError, issue_for_replicas, renew};
use crate::identity_folder::{IdentityFolder, Membership};
use crate::unix_time;

/// Time for which a hub holds a poll.
const POLL: Duration = Duration::from_secs(20);
/// Delay after a failure.
const BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(60) };
/// Delay after a rejected renewal, which has a cause that does not pass by itself.
const REJECTED_BACKOFF: Backoff = Backoff { first: Duration::from_secs(10), max: Duration::from_secs(600) };

/// Keeps the folder of a spoke's replicas current until the returned future is dropped: obtains its first certificate with
/// that of the spoke, and then renews it. Ends at once if another tool fills the folder of the spoke.
///
/// # Errors
///
/// When a folder cannot be read.
pub async fn follow_replicas(spoke: IdentityFolder, replicas: IdentityFolder) -> std::io::Result<()> {
    replicas.recover()?;
    let mut failures = 0;
    loop {
        let Some(membership) = spoke.membership()? else { return Ok(()) };
        let period = replicas.membership()?.map(|membership| membership.period());
        if period.is_some_and(|period| replicas.has_certificate() && unix_time() < period.not_after) {
            return follow(replicas).await;
        }
        let issued = async {
            let mut connection = AuthorityConnection::with_identity(&spoke, &membership.addresses).await?;
            issue_for_replicas(&replicas, &mut connection, &membership.addresses).await
        };
        if let Err(error) = issued.await {
            failures += 1;
            // No replica can be started meanwhile. Check the hubs.
            tracing::warn!(%error, "failed to obtain a certificate for replicas; trying again");
            tokio::time::sleep(BACKOFF.equal_jitter(failures, rand::random())).await;
        }
    }
}

/// Keeps a folder current until the returned future is dropped; ends at once for a folder that another tool fills.
///
/// # Errors
///
/// When the folder cannot be read.
pub async fn follow(folder: IdentityFolder) -> std::io::Result<()> {
    let Some(mut membership) = folder.membership()? else { return Ok(()) };
    let mut trust = folder.trust()?;
    // Where in its window each certificate is renewed.
    let mut chance: f64 = rand::random();
    let mut failures: u32 = 0;
    let mut rejections: u32 = 0;
    let mut connection = None;
    loop {
        let followed = step(&folder, &mut membership, &mut trust, &mut chance, &mut connection).await;
        match followed {
            Ok(()) => {
                if failures > 0 {
                    // The built-in authority responds again, so certificates are renewed and revocations arrive.
                    tracing::info!("authority reachable again");
                }
                (failures, rejections) = (0, 0);
            }
            Err(error) => {
                connection = None;
                failures += 1;
                let backoff = match error.status() {
                    Some(status) if status.is_client_error() => {
                        rejections += 1;
                        REJECTED_BACKOFF.equal_jitter(rejections, rand::random())
                    }
                    Some(_) | None => BACKOFF.equal_jitter(failures, rand::random()),
                };
                let left = membership.period().not_after.saturating_sub(unix_time());
                if failures == 1 {
                    // Connections continue with the present certificate, and revocations arrive late. Check the hubs;
                    // after `expires_in_s` a new join token is needed.
                    tracing::warn!(%error, expires_in_s = left.as_secs(), "authority unreachable; trying again");
                }
                tokio::time::sleep(backoff).await;
            }
        }
    }
}

/// Renews the certificate if it is due, then polls once for the trusted state.
async fn step(
    folder: &IdentityFolder,
    membership: &mut Membership,
    trust: &mut Option<TrustState>,
    chance: &mut f64,
    connection: &mut Option<AuthorityConnection>,
) -> Result<(), AuthorityError> {
    if connection.is_none() {
        *connection = Some(AuthorityConnection::with_identity(folder, &membership.addresses).await?);
    }
    let Some(open) = connection.as_mut() else { return Ok(()) };
    let signer = trust.as_ref().map(|trust| trust.signer().fingerprint.to_string());
    let is_of_old_authority = signer.is_some_and(|signer| signer != membership.authority);
    let now = unix_time();
    let due = issue::renewal(membership.period(), is_of_old_authority, *chance, now);
    if due <= now {
        let addresses = membership.addresses.clone();
        *membership = renew(folder, open, &addresses).await?;
        *trust = folder.trust().map_err(|error| AuthorityError::Folder(error.to_string()))?;
        *chance = rand::random();
        // The next connection uses the new certificate.
        *connection = None;
        // The process has a new certificate of the built-in authority, which expires at `expires_s` (Unix time).
        tracing::info!(serial = membership.serial, expires_s = membership.not_after_s, "certificate renewed");
        return Ok(());
    }
    let wait = POLL.min(due - now);
    let offered = open.poll_trust(trust.as_ref().map(|trust| trust.generation), wait).await?;
    let Some(accepted) = offered.and_then(|offered| offered.accept(trust.as_ref(), unix_time())) else {
        return Ok(());
    };
    folder.write_trust(&accepted).map_err(|error| AuthorityError::Folder(error.to_string()))?;
    // The built-in authority has published other authorities or revocations, and the process uses them.
    tracing::info!(
        generation = accepted.generation,
        authorities = accepted.authorities.len(),
        revoked = accepted.revoked.len(),
        "trusted state updated"
    );
    *trust = Some(accepted);
    Ok(())
}
