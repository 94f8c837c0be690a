//! Tests of the rules for views, without messages.

use super::*;
use crate::membership::ViewFault;

#[test]
fn more_than_half_with_a_tie_breaker_of_one_and_a_half() {
    // Each entry: number of members, voters, and whether they are a majority. Member 0 is the tie-breaker.
    let table: &[(u32, &[u32], bool)] = &[
        (1, &[0], true),
        (1, &[], false),
        (2, &[0], true),
        (2, &[1], false),
        (2, &[0, 1], true),
        (3, &[0], false),
        (3, &[0, 1], true),
        (3, &[1, 2], true),
        (4, &[0, 1], true),
        (4, &[2, 3], false),
        (4, &[1, 2, 3], true),
        (5, &[0, 1], false),
        (5, &[0, 1, 2], true),
        (5, &[2, 3, 4], true),
        (5, &[3, 4], false),
        (6, &[0, 1, 2], true),
        (6, &[3, 4, 5], false),
        (8, &[0, 1, 2, 3], true),
        (8, &[4, 5, 6, 7], false),
        // Ids that are not in the view do not count.
        (3, &[0, 8, 9], false),
    ];
    for (n, voters, decided) in table {
        assert_eq!(first(*n).has_majority(&ids(voters)), *decided, "{voters:?} of {n}");
    }
}

#[test]
fn of_a_set_and_the_rest_never_both_and_always_one() {
    for n in 1..=10_u32 {
        let view = first(n);
        for set in 0..1_u32 << n {
            let (one, rest): (Vec<u32>, Vec<u32>) = (0..n).partition(|i| set >> i & 1 == 1);
            assert!(view.has_majority(&ids(&one)) != view.has_majority(&ids(&rest)), "{one:?} of {n}");
        }
    }
}

/// Returns all subsets of `0..n`.
fn sets(n: u32) -> Vec<BTreeSet<MemberId>> {
    (0..1_u32 << n).map(|set| (0..n).filter(|i| set >> i & 1 == 1).map(id).collect()).collect()
}

#[test]
fn the_fewest_that_are_a_majority() {
    // Each entry: number of members, size of the smallest majority with the tie-breaker, and without it.
    let table =
        [(2, 1, None), (3, 2, Some(2)), (4, 2, Some(3)), (5, 3, Some(3)), (6, 3, Some(4)), (7, 4, Some(4))];
    for (n, with, without) in table {
        for tie_breaker in 0..n {
            let view = View { tie_breaker: id(tie_breaker), ..first(n) };
            for set in sets(n) {
                let fewest = if set.contains(&view.tie_breaker) { Some(with) } else { without };
                let expected = fewest.is_some_and(|fewest| set.len() >= fewest);
                assert_eq!(view.has_majority(&set), expected, "{set:?} of {n}, tie-breaker {tie_breaker}");
            }
        }
    }
}

#[test]
fn two_majorities_share_a_member() {
    for n in 2..=7 {
        for tie_breaker in 0..n {
            let view = View { tie_breaker: id(tie_breaker), ..first(n) };
            let majorities: Vec<_> = sets(n).into_iter().filter(|set| view.has_majority(set)).collect();
            assert_eq!(majorities.len(), 1 << (n - 1), "of each set and the rest, one");
            for one in &majorities {
                assert!(majorities.iter().all(|other| !one.is_disjoint(other)), "{one:?} of {n}");
            }
        }
    }
}

#[test]
fn the_tie_breaker_stays_or_the_first_member_takes_its_place() {
    let view = first(4);
    assert_eq!(view.without(&ids(&[2]), START).unwrap().tie_breaker, id(0));
    let next = view.without(&ids(&[0]), START).unwrap();
    assert_eq!((next.tie_breaker, next.epoch, next.parent), (id(1), 2, view.digest()));
    // Member 0 joins again. Member 1 remains the tie-breaker and is sorted before 0, which joined later.
    let again = next.with(&[member(0)], START).unwrap();
    assert_eq!((again.tie_breaker, again.members[3].id, again.members[3].joined), (id(1), id(0), 3));
    for (next, old) in [(&next, &view), (&again, &next)] {
        next.follows(old).unwrap();
    }
}

#[test]
fn the_earliest_that_is_heard_coordinates() {
    let view = first(2).with(&[member(9), member(5)], START).unwrap();
    let order: Vec<&MemberId> = [&[][..], &[0], &[0, 1], &[0, 1, 5], &[1]]
        .map(|silent| view.coordinator(&ids(silent)).unwrap_or_else(|| panic!()))
        .to_vec();
    assert_eq!(order, [&id(0), &id(1), &id(5), &id(9), &id(0)]);
    assert_eq!(view.coordinator(&ids(&[0, 1, 5, 9])), None);
}

#[test]
fn at_most_as_many_come_in_as_there_are() {
    let newcomers: Vec<Member> = (10..15).rev().map(member).collect();
    let view = first(2).with(&newcomers, START).unwrap();
    assert_eq!(view.ids(), ids(&[0, 1, 10, 11]));
    // The old members alone can remove the newcomers again.
    assert!(view.has_majority(&ids(&[0, 1])));
    assert_eq!(view.with(&newcomers, START).unwrap().members.len(), 7);
    // A present member is not a newcomer, and neither is one whose slot is taken.
    assert_eq!(first(2).with(&[member(1), Member::new(id(8), 0)], START), None);
    let twice = [Member::new(id(8), 5), Member::new(id(9), 5), Member::new(id(8), 6)];
    assert_eq!(first(3).with(&twice, START).unwrap().members.len(), 4);
}

#[test]
fn what_does_not_follow_is_refused_with_the_rule() {
    let old = first(3);
    let next = old.without(&ids(&[2]), START).unwrap();
    let grown = old.with(&[member(7)], START).unwrap();
    let change = |view: &View, change: &dyn Fn(&mut View)| {
        let mut view = view.clone();
        change(&mut view);
        view.follows(&old).unwrap_err()
    };
    let seven = *grown.member(&id(7)).unwrap();
    let cases: &[(ViewFault, &str)] = &[
        (change(&next, &|view| view.members.clear()), "the view has no members"),
        (
            change(&next, &|view| view.epoch = 3),
            "epoch 3 of incarnation 1 does not follow epoch 1 of incarnation 1",
        ),
        (change(&next, &|view| view.incarnation = 2), "epoch 2 of incarnation 2 does not follow"),
        (change(&next, &|view| view.parent = START.plan), "the parent of the view is 0909"),
        (change(&next, &|view| view.members.swap(0, 1)), "not sorted"),
        (change(&next, &|view| view.members[1] = view.members[0]), "#0 is listed twice"),
        (change(&next, &|view| view.members[1].slot = 0), "two members of the view have slot 0"),
        (change(&next, &|view| view.members[1].joined = 9), "#1 joined in an epoch after"),
        (change(&next, &|view| view.members.push(seven)), "the view removes #2 and also admits newcomers"),
        (change(&next, &|view| view.tie_breaker = id(1)), "the tie-breaker #1 is not the member"),
        (change(&next, &|view| view.tie_breaker = id(2)), "the tie-breaker #2 is not the member"),
        (
            change(&grown, &|view| view.members[3].joined = 1),
            "#7 is new in the view, but joined in an epoch before",
        ),
        (
            change(&grown, &|view| {
                view.members.extend((8..12).map(|n| Member { joined: 2, ..member(n) }));
            }),
            "the view admits 5 newcomers, more than the 3 members",
        ),
        (
            change(&grown, &|view| {
                view.members = (0..3000).map(|n| Member { joined: 1, ..member(n) }).collect();
            }),
            "the view has 3000 members, at most 2048 are allowed",
        ),
    ];
    for (fault, says) in cases {
        assert!(fault.to_string().contains(says), "{fault}");
    }
    assert_eq!(old.without(&ids(&[0, 1, 2]), START), None, "nobody would be left");
    assert_eq!(old.without(&ids(&[5]), START), None, "nobody leaves");
}
